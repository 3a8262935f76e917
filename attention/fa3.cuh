/* What the FlashAttention kernels for Hopper share: tensor maps, tiles to and from memory, and the products of a
   warpgroup. */
#ifndef ATTENTION_FA3_CUH
#define ATTENTION_FA3_CUH

#include "attention/fa2.cuh"
#include "attention/wgmma_sm90.cuh"

/* ---- tensor maps ---- */

/* How TMA sees a [batch, seq, heads, head_dim] tensor: dimensions (head_dim, seq, heads, batch), boxes of some positions by
   one panel of a tile. Reading past the end of a sequence or of head_dim gives zeros, writing nothing. */
struct tensor_map {
    CUtensorMap wide, tail; /* for panels of 64 columns, and for the narrower one */
};

static inline enum status encode_tensor_map(CUtensorMap *map, const struct attention *a,
    const struct attention_params *p, const struct attention_tensor &t, int64_t seqlen, int64_t heads,
    int box_rows, int box_columns) {
    cuuint64_t sizes[4] = {
        (cuuint64_t)p->head_dim, (cuuint64_t)seqlen, (cuuint64_t)heads, (cuuint64_t)p->batch};
    const int64_t strides[3] = {t.seq_stride, t.head_stride, t.batch_stride};
    cuuint64_t stride_bytes[3];
    for (int i = 0; i < 3; i++) {
        /* of a dimension of one element it is never used, but must be valid */
        stride_bytes[i] = sizes[i + 1] == 1 ? 16 : (cuuint64_t)strides[i] * sizeof(uint16_t);
    }
    cuuint32_t box[4] = {(cuuint32_t)box_columns, (cuuint32_t)box_rows, 1, 1}, steps[4] = {1, 1, 1, 1};
    CUtensorMapSwizzle swizzle = box_columns == 64   ? CU_TENSOR_MAP_SWIZZLE_128B
                                 : box_columns == 32 ? CU_TENSOR_MAP_SWIZZLE_64B
                                                     : CU_TENSOR_MAP_SWIZZLE_32B;
    CUtensorMapDataType type =
        p->dtype == DTYPE_BF16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
    decltype(&cuTensorMapEncodeTiled) encode = (decltype(&cuTensorMapEncodeTiled))a->encode_tensor_map;
    CUresult result =
        encode(map, type, 4, t.data, sizes, stride_bytes, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle,
            CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    if (result != CUDA_SUCCESS) {
        return fail(
            "attention fa3: the driver refuses a tensor with strides of %lld, %lld, %lld elements (error "
            "%d): use fa2",
            (long long)t.batch_stride, (long long)t.seq_stride, (long long)t.head_stride, (int)result);
    }
    return STATUS_OK;
}

/* For loads and stores of box_rows rows of a Tile at a time. */
template <typename Tile>
static enum status make_tensor_map(tensor_map *map, const struct attention *a,
    const struct attention_params *p, const struct attention_tensor &t, int64_t seqlen, int64_t heads,
    int box_rows) {
    CHECK(encode_tensor_map(&map->wide, a, p, t, seqlen, heads, box_rows, Tile::WIDTH));
    return Tile::TAIL == 0 ? STATUS_OK
                           : encode_tensor_map(&map->tail, a, p, t, seqlen, heads, box_rows, Tile::TAIL);
}

/* ---- tiles ---- */

/* All panels of a tile, by one thread. */
template <typename Tile>
__device__ __forceinline__ void load_tile(
    uint32_t tile, const tensor_map &map, uint32_t barrier, int position, int head, int batch) {
#pragma unroll
    for (int i = 0; i < Tile::PANELS; i++) {
        tma_load(tile + i * Tile::panel::BYTES, &map.wide, barrier, i * Tile::WIDTH, position, head, batch);
    }
    if constexpr (Tile::TAIL > 0) {
        tma_load(
            tile + Tile::TAIL_OFFSET, &map.tail, barrier, Tile::PANELS * Tile::WIDTH, position, head, batch);
    }
}

/* The way back, of the map's box_rows from first_row of the tile on. */
template <typename Tile>
__device__ __forceinline__ void store_tile_async(
    const tensor_map &map, uint32_t tile, int first_row, int position, int head, int batch) {
#pragma unroll
    for (int i = 0; i < Tile::PANELS; i++) {
        tma_store(&map.wide, tile + i * Tile::panel::BYTES + first_row * Tile::panel::ROW_BYTES,
            i * Tile::WIDTH, position, head, batch);
    }
    if constexpr (Tile::TAIL > 0) {
        tma_store(&map.tail, tile + Tile::TAIL_OFFSET + first_row * Tile::tail_panel::ROW_BYTES,
            Tile::PANELS * Tile::WIDTH, position, head, batch);
    }
    bulk_commit();
}

/* ---- products of a warpgroup ---- */

/* COUNT of the fragments d, from FIRST on */
template <int FIRST, int COUNT, int N>
__device__ __forceinline__ float (&part_of(float (&d)[N][4]))[COUNT][4] {
    return *reinterpret_cast<float(*)[COUNT][4]>(&d[FIRST]);
}

/* d = A B: 64 rows of A by all rows of B, the depth in the columns of both */
template <enum dtype TYPE, typename TileA, typename TileB, int N>
__device__ __forceinline__ void multiply_rows(float (&d)[N][4], const TileA &a, const TileB &b) {
    static_assert(TileA::COLUMNS == TileB::COLUMNS && N * 8 == TileB::ROWS, "the depth and the columns");
#pragma unroll
    for (int k = 0; k < TileA::COLUMNS / 16; k++) {
        wgmma_tiles<TYPE, DEPTH_ACROSS, DEPTH_ACROSS>(d, a.across(k), b.across(k), k > 0);
    }
}

/* d += A B, A in registers, B all of a tile with the depth in its rows */
template <enum dtype TYPE, typename TileB, int N, int DEPTH>
__device__ __forceinline__ void multiply_fragments(
    float (&d)[N][4], const uint32_t (&a)[DEPTH][4], const TileB &b) {
    static_assert(DEPTH * 16 == TileB::ROWS && N * 8 == TileB::COLUMNS, "the depth and the columns");
    constexpr int WIDE = TileB::PANELS * 8, TAIL = TileB::TAIL / 8, FIRST = WIDE < 16 ? WIDE : 16;
#pragma unroll
    for (int k = 0; k < DEPTH; k++) {
        wgmma_fragment<TYPE, DEPTH_DOWN>(part_of<0, FIRST>(d), a[k], b.down(k), true);
        if constexpr (WIDE > FIRST) {
            wgmma_fragment<TYPE, DEPTH_DOWN>(
                part_of<FIRST, WIDE - FIRST>(d), a[k], b.down(k, FIRST * 8), true);
        }
        if constexpr (TAIL > 0) {
            wgmma_fragment<TYPE, DEPTH_DOWN>(part_of<WIDE, TAIL>(d), a[k], b.down_tail(k), true);
        }
    }
}

/* d = A^T B: 64 columns of A by N * 8 columns of B, the depth in the rows of both */
template <enum dtype TYPE, typename TileA, typename TileB, int N>
__device__ __forceinline__ void multiply_columns(float (&d)[N][4], const TileA &a, const TileB &b) {
    static_assert(TileA::ROWS == TileB::ROWS, "the depth");
    constexpr int TAIL = N * 8 == TileB::COLUMNS ? TileB::TAIL / 8 : 0, WIDE = N - TAIL;
#pragma unroll
    for (int k = 0; k < TileA::ROWS / 16; k++) {
        wgmma_tiles<TYPE, DEPTH_DOWN, DEPTH_DOWN>(part_of<0, WIDE>(d), a.down(k), b.down(k), k > 0);
        if constexpr (TAIL > 0) {
            wgmma_tiles<TYPE, DEPTH_DOWN, DEPTH_DOWN>(
                part_of<WIDE, TAIL>(d), a.down(k), b.down_tail(k), k > 0);
        }
    }
}

#endif

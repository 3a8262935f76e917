/* What the FlashAttention kernels for Hopper share: tensor maps, and the choice of a head dimension. */
#ifndef ATTENTION_FA3_CUH
#define ATTENTION_FA3_CUH

#include "attention/fa2.cuh"
#include "attention/wgmma_sm90.cuh"

/* ---- tensor maps ---- */

/* How TMA sees a [batch, seq, heads, head_dim] tensor: dimensions (head_dim, seq, heads, batch), boxes of box_rows
   positions by one panel of a tile. Reading past the end of a sequence or of head_dim gives zeros, writing nothing. */
template <typename Tile>
static enum status make_tensor_map(CUtensorMap *map, const struct attention *a,
    const struct attention_params *p, const struct attention_tensor &t, int64_t seqlen, int64_t heads,
    int box_rows) {
    cuuint64_t sizes[4] = {
        (cuuint64_t)p->head_dim, (cuuint64_t)seqlen, (cuuint64_t)heads, (cuuint64_t)p->batch};
    const int64_t strides[3] = {t.seq_stride, t.head_stride, t.batch_stride};
    cuuint64_t stride_bytes[3];
    for (int i = 0; i < 3; i++) {
        /* of a dimension of one element it is never used, but must be valid */
        stride_bytes[i] = sizes[i + 1] == 1 ? 16 : (cuuint64_t)strides[i] * sizeof(uint16_t);
    }
    cuuint32_t box[4] = {Tile::WIDTH, (cuuint32_t)box_rows, 1, 1}, steps[4] = {1, 1, 1, 1};
    CUtensorMapSwizzle swizzle = Tile::WIDTH == 64   ? CU_TENSOR_MAP_SWIZZLE_128B
                                 : Tile::WIDTH == 32 ? CU_TENSOR_MAP_SWIZZLE_64B
                                                     : CU_TENSOR_MAP_SWIZZLE_32B;
    CUtensorMapDataType type =
        p->dtype == DTYPE_BF16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
    decltype(&cuTensorMapEncodeTiled) encode = (decltype(&cuTensorMapEncodeTiled))a->encode_tensor_map;
    CUresult result =
        encode(map, type, 4, t.data, sizes, stride_bytes, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle,
            CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    if (result != CUDA_SUCCESS) {
        return fail(
            "attention fa3: the driver refuses a tensor of strides %lld, %lld, %lld elements (error %d): "
            "use fa2",
            (long long)t.batch_stride, (long long)t.seq_stride, (long long)t.head_stride, (int)result);
    }
    return STATUS_OK;
}

/* All panels of one tile, or of BOX_ROWS rows of it, by one thread. */
template <typename Tile>
__device__ __forceinline__ void load_tile(
    uint32_t tile, const CUtensorMap *map, uint32_t barrier, int position, int head, int batch) {
#pragma unroll
    for (int panel = 0; panel < Tile::PANELS; panel++) {
        tma_load(tile + panel * Tile::PANEL_BYTES, map, barrier, panel * Tile::WIDTH, position, head, batch);
    }
}

template <typename Tile>
__device__ __forceinline__ void store_tile_async(
    const CUtensorMap *map, uint32_t tile, int position, int head, int batch) {
#pragma unroll
    for (int panel = 0; panel < Tile::PANELS; panel++) {
        tma_store(map, tile + panel * Tile::PANEL_BYTES, panel * Tile::WIDTH, position, head, batch);
    }
    bulk_commit();
}

/* ---- products of a warpgroup ---- */

/* d (+)= A B, A 64 rows and B N columns, both with DEPTH in all columns of their tiles */
template <enum dtype TYPE, typename TileA, typename TileB, int N>
__device__ __forceinline__ void multiply_rows_rows(
    float (&d)[N][4], uint64_t a, int first_row, uint64_t b, bool add) {
    static_assert(TileA::COLUMNS == TileB::COLUMNS, "the depth");
#pragma unroll
    for (int k = 0; k < TileA::COLUMNS / 16; k++) {
        wgmma_tiles<TYPE, DEPTH_ACROSS, DEPTH_ACROSS>(d, TileA::template step<DEPTH_ACROSS>(a, k, first_row),
            TileB::template step<DEPTH_ACROSS>(b, k), add || k > 0);
    }
}

/* d (+)= A B, A in registers, B all of a tile with the depth in its rows */
template <enum dtype TYPE, typename TileB, int N, int DEPTH>
__device__ __forceinline__ void multiply_fragments_rows(
    float (&d)[N][4], const uint32_t (&a)[DEPTH][4], uint64_t b, bool add) {
    static_assert(DEPTH * 16 == TileB::ROWS && N * 8 == TileB::COLUMNS, "the depth and the columns");
#pragma unroll
    for (int k = 0; k < DEPTH; k++) {
        wgmma_fragment<TYPE, DEPTH_DOWN>(d, a[k], TileB::template step<DEPTH_DOWN>(b, k), add || k > 0);
    }
}

#endif

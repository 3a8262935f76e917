/* Tiles in shared memory as TMA writes them and wgmma reads them, on sm_90a.

   A tile of ROWS x COLUMNS 16-bit elements is panels of 64 columns, one behind the other; if columns are left, 16 or 32, they
   are a narrower panel at the end, so that 80 columns are 80. A row of a panel has 128 bytes (64, 32), and chunks of 16 bytes
   change places within 8 rows (swizzle): what TMA and wgmma do without conflicts. A tile begins at a multiple of 1024 bytes.

   A product with a depth of 16 takes 16 columns of a tile (DEPTH_ACROSS: the tile's rows are rows of A or columns of B) or 16
   rows of it (DEPTH_DOWN: its columns are). */
#ifndef ATTENTION_PANEL_TILE_CUH
#define ATTENTION_PANEL_TILE_CUH

#include "attention/tile.cuh"

enum depth { DEPTH_ACROSS = 0, DEPTH_DOWN = 1 };

/* One panel: where chunks are, and what wgmma is told. */
template <int ROWS, int WIDTH> struct tile_panel {
    static constexpr int ROW_BYTES = 2 * WIDTH, BYTES = ROWS * ROW_BYTES;
    static_assert(BYTES % 1024 == 0, "the next panel begins where a swizzle does");

    static __device__ __forceinline__ uint32_t offset(unsigned row, unsigned chunk) {
        return row * ROW_BYTES + (chunk * 16 ^ (row * ROW_BYTES >> 3 & (ROW_BYTES - 16)));
    }
    /* Address, distance of panels (read only for DEPTH_DOWN), distance of groups of 8 rows, swizzle. */
    static __device__ __forceinline__ uint64_t descriptor(uint32_t address) {
        constexpr uint64_t SWIZZLE = WIDTH == 64 ? 1 : WIDTH == 32 ? 2 : 3;
        return (uint64_t)(address >> 4 & 0x3FFF) | (uint64_t)(BYTES >> 4 & 0x3FFF) << 16 |
               (uint64_t)(8 * ROW_BYTES >> 4) << 32 | SWIZZLE << 62;
    }
};

template <int ROWS_, int COLUMNS_> struct panel_tile {
    static constexpr int ROWS = ROWS_, COLUMNS = COLUMNS_;
    static constexpr int WIDTH = 64, PANELS = COLUMNS / WIDTH, TAIL = COLUMNS % WIDTH;
    static_assert(PANELS > 0 && (TAIL == 0 || TAIL == 16 || TAIL == 32), "there are swizzles for these");
    using panel = tile_panel<ROWS, WIDTH>;
    using tail_panel = tile_panel<ROWS, TAIL == 0 ? WIDTH : TAIL>;
    static constexpr int TAIL_OFFSET = PANELS * panel::BYTES,
                         BYTES = TAIL_OFFSET + (TAIL == 0 ? 0 : tail_panel::BYTES);

    /* offset of 8 elements, a chunk of 16 bytes, from the tile's beginning */
    static __device__ __forceinline__ uint32_t offset(unsigned row, unsigned chunk) {
        constexpr unsigned CHUNKS = WIDTH / 8, WIDE = PANELS * CHUNKS;
        return TAIL > 0 && chunk >= WIDE ? TAIL_OFFSET + tail_panel::offset(row, chunk - WIDE)
                                         : chunk / CHUNKS * panel::BYTES + panel::offset(row, chunk % CHUNKS);
    }

    /* The tile as wgmma sees it from a first row (a multiple of 8) or a first column (a multiple of 64) on. */
    uint64_t wide, tail;

    __device__ __forceinline__ panel_tile(uint32_t address, int first_row = 0, int first_column = 0)
        : wide(panel::descriptor(
              address + first_row * panel::ROW_BYTES + first_column / WIDTH * panel::BYTES)),
          tail(TAIL == 0
                   ? 0
                   : tail_panel::descriptor(address + TAIL_OFFSET + first_row * tail_panel::ROW_BYTES)) {
    }
    /* DEPTH_ACROSS: columns 16 k to 16 k + 15 of all rows */
    __device__ __forceinline__ uint64_t across(int k) const {
        int column = 16 * k;
        return column < PANELS * WIDTH
                   ? wide + (uint64_t)(column / WIDTH * panel::BYTES + column % WIDTH * 2 >> 4)
                   : tail + (uint64_t)((column - PANELS * WIDTH) * 2 >> 4);
    }
    /* DEPTH_DOWN: rows 16 k to 16 k + 15 of the wide panels' columns, from a first one (a multiple of 64) on, and of the
       tail's */
    __device__ __forceinline__ uint64_t down(int k, int first_column = 0) const {
        return wide + (uint64_t)((first_column / WIDTH * panel::BYTES + 16 * k * panel::ROW_BYTES) >> 4);
    }
    __device__ __forceinline__ uint64_t down_tail(int k) const {
        return tail + (uint64_t)(16 * k * tail_panel::ROW_BYTES >> 4);
    }
};

#endif

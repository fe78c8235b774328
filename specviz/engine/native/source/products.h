/* Products of int8 weights with rows of int8 activations, and how rows become int8. It knows nothing of layers.

   Sums are whole numbers and exact (at most 65,536 inputs fit 32 bits), so a row's result depends neither on the rows beside it, nor on
   the kernel, nor on who computes it. Every row has one scale, its largest magnitude over 127, and every output has one.

   Layout of the weights: tiles of 64 outputs; in a tile four inputs of output 0, the same four of output 1, ... of output 63, then the next
   four inputs. A tile is one stretch of memory, read once from front to back for up to 16 rows. */
#ifndef SPECVIZ_PRODUCTS_H
#define SPECVIZ_PRODUCTS_H

#include "vector.h"

#define TILE 64
#define ROUND_UP(x, to) (((x) + (to) - 1) / (to) * (to))

typedef struct {
    const int8_t *weights;      /* [num_tiles][num_in / 4][64][4] */
    const float *scales;        /* [num_tiles * 64] */
    const int32_t *sums;        /* [num_tiles * 64], -128 times the sum of each output's weights */
    const float *bias;          /* [num_tiles * 64] or NULL */
    int32_t num_out, num_in;    /* num_in is a multiple of 4 */
} Product;

/* ---- kernels: sums[row][64] of one tile or a part of it, for at most MOST_ROWS rows ------------------------------------------------------
   weights: `quads` times four inputs. begin: what the sums begin with, a row `begin_stride` after the one before it. In every step of the inner
   loop `lines` cache lines are asked for, from `ahead` on, where that helps. */
#if defined(SPECVIZ_PLAIN)
#define KERNEL "plain C"
#elif defined(__AVX512VNNI__) && defined(__AVX512BW__)
#define KERNEL "AVX512 VNNI"
#define OFFSET 0x80             /* the instruction wants unsigned activations: 128 is added, and taken off again through `sums` */
#define MOST_ROWS 6
#define EACH_ROWS(DO) DO(1) DO(2) DO(3) DO(4) DO(5) DO(6)
#define BLOCK_QUADS 48               /* 12 KB of weights stay in the nearest cache while several passes read them; measured */

/* As _mm512_dpbusd_epi32, whose form for the compiler makes gcc 12 copy and spill sums in the inner loop (measured: 2.3 times as slow). */
INLINE __m512i dot4(__m512i total, __m512i x, __m512i w) {
    __asm__("vpdpbusd %2, %1, %0" : "+v"(total) : "v"(x), "v"(w));
    return total;
}

INLINE void tile_fixed(const int8_t *weights, int quads, const uint8_t *x, int stride, const int32_t *begin, int begin_stride, int32_t *sums,
                       const int8_t *ahead, const int rows, const int lines) {
    __m512i total[MOST_ROWS][4];
    UNROLLED for (int r = 0; r < rows; r++)
        UNROLLED for (int v = 0; v < 4; v++) total[r][v] = _mm512_loadu_si512(begin + begin_stride * r + 16 * v);
    for (int k = 0; k < quads; k++, weights += 4 * TILE, ahead += 64 * lines) {
        UNROLLED for (int i = 0; i < lines; i++) _mm_prefetch((const char *)ahead + 64 * i, _MM_HINT_T0);
        __m512i w[4];
        UNROLLED for (int v = 0; v < 4; v++) w[v] = _mm512_loadu_si512(weights + 64 * v);
        UNROLLED for (int r = 0; r < rows; r++) {
            int32_t quad;
            memcpy(&quad, x + (size_t)r * stride + 4 * k, 4);
            const __m512i spread = _mm512_set1_epi32(quad);
            UNROLLED for (int v = 0; v < 4; v++) total[r][v] = dot4(total[r][v], spread, w[v]);
        }
    }
    UNROLLED for (int r = 0; r < rows; r++)
        UNROLLED for (int v = 0; v < 4; v++) _mm512_storeu_si512(sums + TILE * r + 16 * v, total[r][v]);
}
#elif defined(__AVX2__)
#if defined(__AVXVNNI__)
#define KERNEL "AVX VNNI"
#define OFFSET 0x80
#else
#define KERNEL "AVX2"
#define OFFSET 0
#endif
#define MOST_ROWS 2
#define EACH_ROWS(DO) DO(1) DO(2)

INLINE __m256i dot4(__m256i total, __m256i x, __m256i w) {
#if defined(__AVXVNNI__)
    return _mm256_dpbusd_avx_epi32(total, x, w);
#else                           /* the sign goes from x to w: two products of at most 127 * 127 each fit 16 bits and cannot saturate */
    __m256i pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(x), _mm256_sign_epi8(w, x));
    return _mm256_add_epi32(total, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
#endif
}

INLINE void tile_fixed(const int8_t *weights, int quads, const uint8_t *x, int stride, const int32_t *begin, int begin_stride, int32_t *sums,
                       const int8_t *ahead, const int rows, const int lines) {
    (void)ahead; (void)lines;
    for (int half = 0; half < 2; half++) {
        __m256i total[MOST_ROWS][4];
        UNROLLED for (int r = 0; r < rows; r++)
            UNROLLED for (int v = 0; v < 4; v++)
                total[r][v] = _mm256_loadu_si256((const __m256i *)(begin + begin_stride * r + 32 * half + 8 * v));
        const int8_t *w = weights + 128 * half;
        for (int k = 0; k < quads; k++, w += 4 * TILE) {
            UNROLLED for (int r = 0; r < rows; r++) {
                int32_t quad;
                memcpy(&quad, x + (size_t)r * stride + 4 * k, 4);
                const __m256i spread = _mm256_set1_epi32(quad);
                UNROLLED for (int v = 0; v < 4; v++)
                    total[r][v] = dot4(total[r][v], spread, _mm256_loadu_si256((const __m256i *)(w + 32 * v)));
            }
        }
        UNROLLED for (int r = 0; r < rows; r++)
            UNROLLED for (int v = 0; v < 4; v++) _mm256_storeu_si256((__m256i *)(sums + TILE * r + 32 * half + 8 * v), total[r][v]);
    }
}
#elif defined(__ARM_FEATURE_DOTPROD) && defined(__aarch64__)
#define KERNEL "NEON dot product"
#define OFFSET 0
#define MOST_ROWS 1
#define EACH_ROWS(DO) DO(1)

INLINE void tile_fixed(const int8_t *weights, int quads, const uint8_t *x, int stride, const int32_t *begin, int begin_stride, int32_t *sums,
                       const int8_t *ahead, const int rows, const int lines) {
    (void)stride; (void)begin_stride; (void)ahead; (void)rows; (void)lines;
    int32x4_t total[16];
    for (int v = 0; v < 16; v++) total[v] = vld1q_s32(begin + 4 * v);
    for (int k = 0; k < quads; k++, weights += 4 * TILE) {
        int32_t quad;
        memcpy(&quad, x + 4 * k, 4);
        int8x16_t spread = vreinterpretq_s8_s32(vdupq_n_s32(quad));
        for (int v = 0; v < 16; v++) total[v] = vdotq_s32(total[v], vld1q_s8(weights + 16 * v), spread);
    }
    for (int v = 0; v < 16; v++) vst1q_s32(sums + 4 * v, total[v]);
}
#else
#define KERNEL "plain C"
#endif

#if !defined(MOST_ROWS)
#define OFFSET 0
#define MOST_ROWS 1
#define EACH_ROWS(DO) DO(1)

INLINE void tile_fixed(const int8_t *weights, int quads, const uint8_t *x, int stride, const int32_t *begin, int begin_stride, int32_t *sums,
                       const int8_t *ahead, const int rows, const int lines) {
    (void)stride; (void)begin_stride; (void)ahead; (void)rows; (void)lines;
    int32_t total[TILE];
    memcpy(total, begin, sizeof total);
    for (int k = 0; k < quads; k++, weights += 4 * TILE) {
        const int8_t *quad = (const int8_t *)x + 4 * k;
        const int16_t a = quad[0], b = quad[1], c = quad[2], d = quad[3];
        for (int o = 0; o < TILE; o++)
            total[o] += (int32_t)(a * weights[4 * o]) + b * weights[4 * o + 1] + c * weights[4 * o + 2] + d * weights[4 * o + 3];
    }
    memcpy(sums, total, sizeof total);
}
#endif

static void tile_rows(const int8_t *weights, int quads, const uint8_t *x, int stride, const int32_t *begin, int begin_stride, int32_t *sums,
                      const int8_t *ahead, int rows, int lines) {
    switch (8 * rows + lines) {
#define CASE(n) \
    case 8 * n + 4: tile_fixed(weights, quads, x, stride, begin, begin_stride, sums, ahead, n, 4); return; \
    case 8 * n + 2: tile_fixed(weights, quads, x, stride, begin, begin_stride, sums, ahead, n, 2); return; \
    case 8 * n + 1: tile_fixed(weights, quads, x, stride, begin, begin_stride, sums, ahead, n, 1); return;
    EACH_ROWS(CASE)
#undef CASE
    }
}

#define GROUP 24                     /* rows whose sums are made in one reading of a tile */
#define AHEAD 8192                   /* how many bytes ahead a single pass asks for memory, measured */
#if !defined(BLOCK_QUADS)
#define BLOCK_QUADS (1 << 28)
#endif

/* Sums of one tile for up to GROUP rows, beginning with `offsets` [64]. As many rows go together as registers hold sums for. A single pass
   asks for memory a little ahead; of several, each asks for its part of the block that comes next, so that memory never rests. */
static void tile_group(const int8_t *weights, const int32_t *offsets, int quads, const uint8_t *x, int stride, int32_t *sums, int count) {
    const int passes = (count + MOST_ROWS - 1) / MOST_ROWS, each = (count + passes - 1) / passes;
    const int lines = passes == 1 ? 4 : passes < 4 ? 2 : 1, block = passes == 1 ? quads : BLOCK_QUADS;
    for (int k = 0; k < quads; k += block) {
        const int some = quads - k < block ? quads - k : block;
        const int8_t *part = weights + (size_t)k * 4 * TILE, *ahead = part + (passes == 1 ? AHEAD : some * 4 * TILE);
        for (int r = 0; r < count; r += each, ahead += 64 * lines * some)
            tile_rows(part, some, x + (size_t)r * stride + 4 * k, stride, k ? sums + TILE * r : offsets, k ? TILE : 0, sums + TILE * r, ahead,
                      count - r < each ? count - r : each, lines);
    }
}

/* ---- 16 rows at once with AMX ------------------------------------------------------------------------------------------------------ */
#if defined(__AMX_INT8__) && defined(__AMX_TILE__) && defined(__linux__) && defined(__x86_64__) && !defined(SPECVIZ_PLAIN)
#define HAS_TILES 1
#define TILE_ROWS 16
#define LEAST_FOR_TILES 3       /* fewer rows are as fast without */
#include <sys/syscall.h>
#include <unistd.h>

/* Linux hands the tile registers out on request (arch/x86 xstate documentation); 1 if they may be used. */
static int tiles_allowed(void) {
    static int known = -1;
    if (known < 0) known = syscall(SYS_arch_prctl, 0x1023, 18) == 0;
    return known;
}

/* Registers 0 to 3: sums of `rows` rows and 16 outputs each. 4: the rows' 64 inputs. 5 to 7: 64 inputs of 16 outputs. Few rows are faster. */
static void tiles_begin(int rows) {
    struct { uint8_t palette, start_row, reserved[14]; uint16_t columns[16]; uint8_t rows[16]; } shape = {.palette = 1};
    for (int i = 0; i < 8; i++) shape.columns[i] = 64, shape.rows[i] = i < 5 && rows < 16 ? rows : 16;
    __asm__ volatile("" ::: "memory");        /* the loads below do not tell the compiler what they read */
    _tile_loadconfig(&shape);
}

/* The weights of 64 inputs and 16 outputs into register `to`, while a quarter of those that come two steps later is asked for. */
#define LOAD_WEIGHTS(to, part) \
    for (int i = 0; i < 16; i++) _mm_prefetch((const char *)weights + 8192 + 1024 * (part) + 64 * i, _MM_HINT_T0); \
    _tile_loadd(to, weights + 64 * (part), 256)

static void tile_sixteen(const int8_t *weights, int slabs, const uint8_t *x, int stride, int32_t *sums) {
    _tile_zero(0); _tile_zero(1); _tile_zero(2); _tile_zero(3);
    for (int k = 0; k < slabs; k++, weights += 64 * TILE, x += 64) {
        _tile_loadd(4, x, stride);
        LOAD_WEIGHTS(5, 0);
        _tile_dpbssd(0, 4, 5);
        LOAD_WEIGHTS(6, 1);
        _tile_dpbssd(1, 4, 6);
        LOAD_WEIGHTS(7, 2);
        _tile_dpbssd(2, 4, 7);
        LOAD_WEIGHTS(5, 3);
        _tile_dpbssd(3, 4, 5);
    }
    _tile_stored(0, sums, 256);
    _tile_stored(1, sums + 16, 256);
    _tile_stored(2, sums + 32, 256);
    _tile_stored(3, sums + 48, 256);
}
#else
#define HAS_TILES 0
#define TILE_ROWS 1
#define LEAST_FOR_TILES (1 << 30)
static int tiles_allowed(void) { return 0; }
#endif

/* Whether this product of so many rows goes through the tile registers: then activations keep their sign. */
static int uses_tiles(int num_rows, int num_in) { return num_rows >= LEAST_FOR_TILES && num_in % 64 == 0 && tiles_allowed(); }
static uint8_t offset_for(int num_rows, int num_in) { return uses_tiles(num_rows, num_in) ? 0 : OFFSET; }

/* ---- rows become int8 -------------------------------------------------------------------------------------------------------------- */
/* x [n] -> bytes [n], each number over the returned scale, rounded to even, exclusive-or `offset`. One that is no number makes the scale
   none, so that every output shows it. */
static float quantize(const float *x, int n, uint8_t *to, uint8_t offset) {
    floats most = all(0.0f), strange = all(0.0f);
    for (int i = 0; i < n; i += LANES) {
        floats v = load_some(x + i, n - i);
        most = larger(magnitude(v), most);
        strange += v * 0.0f;
    }
    const float largest = largest_of(most), doubt = sum_of(strange);
    const float inverse = largest > 1e-30f ? 127.0f / largest : 0.0f;
    const floats magic = all(12582912.0f);               /* 1.5 * 2^23: the sum's lowest byte is the rounded number */
    for (int i = 0; i < n; i += LANES) {
        ints rounded = (ints)(load_some(x + i, n - i) * inverse + magic);
        bytes low = __builtin_convertvector(rounded, bytes) ^ offset;
        memcpy(to + i, &low, (size_t)(n - i >= LANES ? LANES : n - i));
    }
    return doubt == 0.0f ? largest / 127.0f : NAN;
}

/* ---- a product --------------------------------------------------------------------------------------------------------------------- */
/* Sums of one tile become floats: times both scales, plus bias; `add`: onto what is there. */
INLINE void finish_tile(const Product *p, int tile, const int32_t *sums, const float *row_scales, int rows, float *out, int out_stride,
                        int add) {
    const int first = tile * TILE, width = p->num_out - first < TILE ? p->num_out - first : TILE;
    for (int r = 0; r < rows; r++) {
        float *to = out + (size_t)r * out_stride + first;
        for (int i = 0; i < width; i += LANES) {
            ints whole;
            memcpy(&whole, sums + TILE * r + i, sizeof whole);
            floats y = __builtin_convertvector(whole, floats) * load(p->scales + first + i) * row_scales[r];
            if (p->bias) y += load(p->bias + first + i);
            if (add) y += load_some(to + i, width - i);
            store_some(to + i, y, width - i);
        }
    }
}

/* Tiles [from, to) of rows x [num_rows][stride] in int8 -> out [num_rows][out_stride]. Rows lie in room for whole groups of TILE_ROWS. */
static void multiply(const Product *p, const uint8_t *x, int stride, const float *row_scales, int num_rows, float *out, int out_stride,
                     int add, int from, int to) {
    int32_t sums[TILE * GROUP] __attribute__((aligned(64)));
    const size_t tile_bytes = (size_t)p->num_in * TILE;
#if HAS_TILES
    if (uses_tiles(num_rows, p->num_in)) {
        tiles_begin(num_rows);
        for (int tile = from; tile < to; tile++)
            for (int r = 0; r < num_rows; r += TILE_ROWS) {
                tile_sixteen(p->weights + tile * tile_bytes, p->num_in / 64, x + (size_t)r * stride, stride, sums);
                finish_tile(p, tile, sums, row_scales + r, num_rows - r < TILE_ROWS ? num_rows - r : TILE_ROWS,
                            out + (size_t)r * out_stride, out_stride, add);
            }
        _tile_release();
        return;
    }
#endif
    const int32_t nothing[TILE] = {0};
    for (int tile = from; tile < to; tile++)
        for (int r = 0; r < num_rows; r += GROUP) {
            const int count = num_rows - r < GROUP ? num_rows - r : GROUP;
            tile_group(p->weights + tile * tile_bytes, OFFSET ? p->sums + tile * TILE : nothing, p->num_in / 4, x + (size_t)r * stride, stride, sums,
                       count);
            finish_tile(p, tile, sums, row_scales + r, count, out + (size_t)r * out_stride, out_stride, add);
        }
}

#endif

/* Attention of one token's query head over the keys that it may see. It knows nothing of layers, trees or rows.

   Keys are visited in the order of their positions, and every sum is added up in an order that follows from a key's index among the visible
   ones alone. So a token's bits do not depend on where its ancestors lie, on its siblings, or on what is computed beside it. */
#ifndef SPECVIZ_ATTENTION_H
#define SPECVIZ_ATTENTION_H

#include "vector.h"

/* Key i lies in slot i below `prefix` and in slot extras[i - prefix] from there on; visible are those from `first` to before `end`. */
typedef struct {
    const float *keys, *values;      /* [slots][head_dim] */
    const int32_t *extras;
    int32_t prefix, first, end, head_dim;
} View;

INLINE const float *entry(const View *view, const float *from, int i) {
    const int slot = i < view->prefix ? i : view->extras[i - view->prefix];
    return from + (size_t)slot * view->head_dim;
}

#if defined(__clang__) || __GNUC__ >= 12
#define CHOOSE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define CHOOSE(a, b, ...) __builtin_shuffle(a, b, (ints){__VA_ARGS__})
#endif

/* Sixteen vectors -> the sum of each, in order: halves are added to halves, for two vectors at a time. */
INLINE floats sums_of(floats *v) {
    for (int i = 0; i < 8; i++)
        v[i] = CHOOSE(v[2 * i], v[2 * i + 1], 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23)
             + CHOOSE(v[2 * i], v[2 * i + 1], 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31);
    for (int i = 0; i < 4; i++)
        v[i] = CHOOSE(v[2 * i], v[2 * i + 1], 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27)
             + CHOOSE(v[2 * i], v[2 * i + 1], 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31);
    for (int i = 0; i < 2; i++)
        v[i] = CHOOSE(v[2 * i], v[2 * i + 1], 0, 1, 4, 5, 8, 9, 12, 13, 16, 17, 20, 21, 24, 25, 28, 29)
             + CHOOSE(v[2 * i], v[2 * i + 1], 2, 3, 6, 7, 10, 11, 14, 15, 18, 19, 22, 23, 26, 27, 30, 31);
    return CHOOSE(v[0], v[1], 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30)
         + CHOOSE(v[0], v[1], 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31);
}

#define MOST_TOGETHER 6              /* query heads, of one token or of two, that read the same keys and values once */
#define MOST_PIECES 17               /* vectors of a head of at most 256 numbers, and a part of one */

/* One vector of a key or a value: all of it, or its last part. */
INLINE floats piece(const float *from, int c, const int chunks, const int tail) {
    return c < chunks ? load(from + LANES * c) : load_part(from + LANES * c, tail);
}

/* Products of the query heads [from, to) with sixteen keys of a view, of which `count` are visible. Behind the last key it is repeated. */
INLINE void score_keys(const View *view, int j, int count, floats q[MOST_TOGETHER][MOST_PIECES], floats *most, float *scores, size_t stride,
                       const int from, const int to, const int chunks, const int tail) {
    const int pieces = chunks + (tail > 0);
    floats totals[MOST_TOGETHER][LANES];
    for (int i = 0; i < LANES; i++) {
        const float *key = entry(view, view->keys, view->first + (j + i < count ? j + i : count - 1));
        floats total[MOST_TOGETHER], k = piece(key, 0, chunks, tail);
        UNROLLED for (int h = from; h < to; h++) total[h] = q[h][0] * k;
        UNROLLED for (int c = 1; c < pieces; c++) {
            k = piece(key, c, chunks, tail);
            UNROLLED for (int h = from; h < to; h++) total[h] = fused(q[h][c], k, total[h]);
        }
        UNROLLED for (int h = from; h < to; h++) totals[h][i] = total[h];
    }
    for (int h = from; h < to; h++) {
        const floats found = sums_of(totals[h]);
        most[h] = larger(found, most[h]);
        store(scores + h * stride + j, found);
    }
}

/* Value `j` of a view, onto the sums of the heads [from, to), each times its share. */
INLINE void add_value(const View *view, int j, floats sums[MOST_TOGETHER][MOST_PIECES], const float *scores, size_t stride, const int from,
                      const int to, const int chunks, const int tail) {
    const float *value = entry(view, view->values, view->first + j);
    UNROLLED for (int c = 0; c < chunks + (tail > 0); c++) {
        const floats v = piece(value, c, chunks, tail);
        UNROLLED for (int h = from; h < to; h++) sums[h][c] = fused(all(scores[h * stride + j]), v, sums[h][c]);
    }
}

/* How many keys, from the first visible one on, two tokens see in the same places. */
static int same_keys(const View *a, const View *b) {
    int end = a->prefix < b->prefix ? a->prefix : b->prefix;
    if (a->keys != b->keys || a->first != b->first) return 0;
    if (a->end < end) end = a->end;
    if (b->end < end) end = b->end;
    return end > a->first ? end - a->first : 0;
}

/* `tokens` tokens with `heads` heads each, one token's heads behind the other's. What both see in the same places is read once for both; every
   head adds up its own keys in its own order all the same. chunks: whole vectors of a head. All four are known at compile time for common sizes. */
INLINE void attend_fixed(const View *const *views, const float *const *queries, float *scores, size_t stride, float *const *outs,
                         const int tokens, const int heads, const int chunks, const int tail) {
    const int pieces = chunks + (tail > 0), size = views[0]->head_dim, all_heads = tokens * heads;
    const int same = tokens > 1 ? same_keys(views[0], views[1]) : 0, whole = same / LANES * LANES;
    floats q[MOST_TOGETHER][MOST_PIECES], most[MOST_TOGETHER], sums[MOST_TOGETHER][MOST_PIECES];
    float shares[MOST_TOGETHER];
    for (int h = 0; h < all_heads; h++) {
        most[h] = all(-INFINITY);
        for (int c = 0; c < pieces; c++) q[h][c] = piece(queries[h / heads] + h % heads * size, c, chunks, tail), sums[h][c] = all(0.0f);
    }
    for (int j = 0; j < whole; j += LANES) score_keys(views[0], j, same, q, most, scores, stride, 0, all_heads, chunks, tail);
    UNROLLED for (int t = 0; t < tokens; t++) {
        const int count = views[t]->end - views[t]->first;
        for (int j = whole; j < count; j += LANES)
            score_keys(views[t], j, count, q, most, scores, stride, t * heads, (t + 1) * heads, chunks, tail);
    }
    for (int h = 0; h < all_heads; h++) {
        const int count = views[h / heads]->end - views[h / heads]->first;
        const float peak = largest_of(most[h]);
        float *row = scores + h * stride;
        floats total = all(0.0f);
        for (int j = 0; j < count; j += LANES) {
            store(row + j, exponential(load(row + j) - peak));
            total += load_some(row + j, count - j);
        }
        shares[h] = 1.0f / sum_of(total);
    }
    for (int j = 0; j < same; j++) add_value(views[0], j, sums, scores, stride, 0, all_heads, chunks, tail);
    UNROLLED for (int t = 0; t < tokens; t++) {
        const int count = views[t]->end - views[t]->first;
        for (int j = same; j < count; j++) add_value(views[t], j, sums, scores, stride, t * heads, (t + 1) * heads, chunks, tail);
    }
    for (int h = 0; h < all_heads; h++)
        for (int c = 0; c < pieces; c++) store_some(outs[h / heads] + h % heads * size + LANES * c, sums[h][c] * shares[h], size - LANES * c);
}

/* Two tokens with two or three heads of 64 numbers fill the registers; everything else goes token by token. */
static int go_in_pairs(int num_heads, int head_dim) { return head_dim == 64 && (num_heads == 2 || num_heads == 3); }

/* queries [tokens] of [num_heads][head_dim], scaled already, all heads of a token on the same keys -> outs, likewise. tokens: 1, or 2 where
   they go in pairs. scores: MOST_TOGETHER rows of `stride` floats, as many as there are visible keys, and 15. head_dim is at most 256. */
static void attend(const View *const *views, const float *const *queries, int tokens, int num_heads, float *scores, size_t stride,
                   float *const *outs) {
    const int size = views[0]->head_dim;
    if (tokens == 2) {
        if (num_heads == 3) attend_fixed(views, queries, scores, stride, outs, 2, 3, 4, 0);
        else attend_fixed(views, queries, scores, stride, outs, 2, 2, 4, 0);
        return;
    }
    for (int h = 0; h < num_heads;) {
        const int left = num_heads - h;
        const float *from[1] = {queries[0] + h * size};
        float *const to[1] = {outs[0] + h * size};
        if (size == 64 && left != 1) {
            if (left == 3) attend_fixed(views, from, scores, stride, to, 1, 3, 4, 0), h += 3;
            else if (left >= 4) attend_fixed(views, from, scores, stride, to, 1, 4, 4, 0), h += 4;
            else attend_fixed(views, from, scores, stride, to, 1, 2, 4, 0), h += 2;
        } else if (size == 128 && left != 1) {
            attend_fixed(views, from, scores, stride, to, 1, 2, 8, 0), h += 2;
        } else {
            attend_fixed(views, from, scores, stride, to, 1, 1, size / LANES, size % LANES), h += 1;
        }
    }
}

#endif

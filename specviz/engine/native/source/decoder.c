/* The decoder layers of the Llama family on int8 weights: a step's tokens in, states after the last norm out; the same for a drafting head,
   from a token and the state before it to its best guesses; and single int8 products.

   It knows nothing of texts, trees or memory: whoever calls has checked all sizes and owns every buffer. The same sums in the same order
   are computed for a token whatever is fed beside it, by however many threads. */
#include "attention.h"
#include "products.h"
#include "team.h"

#if defined(__unix__) || defined(__APPLE__)
#include <sys/mman.h>
#endif

#define EXPORT __attribute__((visibility("default")))
#define BLOCK 64                     /* tokens that go through all layers together */

typedef struct {
    Product qkv, out, gate_up, down;
    const float *input_norm, *mlp_norm;          /* [hidden]; no input_norm: the layer reads its input as it is */
    const float *query_norm, *key_norm;          /* [head_dim] or NULL */
    float scaling;
    int32_t window;                              /* 0: none */
} Layer;

typedef struct {
    const Layer *layers;
    const float *final_norm;                     /* [hidden] or NULL */
    float epsilon;
    int32_t num_layers, hidden, num_heads, num_kv_heads, head_dim, intermediate, widest;       /* widest: most inputs of any product */
} Model;

typedef struct {
    float *hidden;                               /* [num_tokens][model.hidden]: embeddings, overwritten */
    const float *cos, *sin;                      /* [positions][head_dim], sin with the sign of the rotated half */
    const int32_t *positions, *rows, *slots;     /* [num_tokens] */
    const int32_t *prefixes, *extras_from;       /* [num_tokens], see View; extras_from: where a token's extras begin */
    const int32_t *extras;
    float *const *keys, *const *values;          /* [num_rows][num_layers] of [kv heads][capacity][head_dim] */
    const int32_t *capacities;                   /* [num_rows][num_layers] */
    float *const *taps;                          /* [num_layers + 1], NULL or where a layer's inputs go, as `normed` */
    float *normed;                               /* [num_tokens][model.hidden], the states after the last norm */
    int32_t num_tokens, num_layers, longest;     /* longest: most keys that any token sees */
    uint8_t *scratch;                            /* specviz_scratch() bytes */
} Step;

/* Around a model's layers: what makes their input of an embedding and a state, and what the LM head reads, which is `normed`. */
typedef struct {
    Product from_token, from_state, vocabulary;      /* [hidden][hidden] twice, the first with the bias of both; [words][hidden] */
    const float *embeddings;                         /* [tokens][hidden] */
} Head;

typedef struct {
    const int64_t *tokens;                           /* [step.num_tokens] */
    const float *states;                             /* [step.num_tokens][hidden] */
    const int32_t *wanted;                           /* [num_wanted] of the step's tokens, behind which guesses are made */
    float *logits;                                   /* [num_wanted][words] */
    float *sums;                                     /* [num_wanted], log of the sum of e to the logits */
    int32_t *best;                                   /* [num_wanted][num_best] words, best first, equal ones in order */
    int32_t num_wanted, num_best;
} Guess;

typedef struct {
    const Model *model;
    const Step *step;
    const Head *head;                            /* NULL but for a drafting head */
    const Guess *guess;
    int start, count;                            /* the block's tokens */
    uint8_t *bytes;                              /* [BLOCK][widest] */
    float *scales, *normed, *mixed, *attended, *gates, *scores;
} Work;

static int widest_mixed(const Model *m) { return (m->num_heads + 2 * m->num_kv_heads) * m->head_dim; }

static size_t scores_room(int longest) { return ROUND_UP((size_t)longest, 64) + 64; }

static size_t lay_out(const Model *m, int longest, int workers, uint8_t *base, Work *work) {
    size_t at = 0;
#define PLACE(member, type, count) \
    do { if (work) work->member = (type *)(base + at); at += ROUND_UP((size_t)(count) * sizeof(type), 64); } while (0)
    PLACE(bytes, uint8_t, (size_t)BLOCK * m->widest);
    PLACE(scales, float, BLOCK);
    PLACE(normed, float, (size_t)BLOCK * m->hidden);
    PLACE(mixed, float, (size_t)BLOCK * widest_mixed(m));
    PLACE(attended, float, (size_t)BLOCK * m->num_heads * m->head_dim);
    PLACE(gates, float, (size_t)BLOCK * 2 * m->intermediate);
    PLACE(scores, float, scores_room(longest) * MOST_TOGETHER * workers);
#undef PLACE
    return at;
}

static void norm(const float *x, const float *weight, int n, float epsilon, float *to) {
    floats squares = all(0.0f);
    for (int i = 0; i < n; i += LANES) {
        floats v = load_some(x + i, n - i);
        squares = fused(v, v, squares);
    }
    const float factor = 1.0f / sqrtf(sum_of(squares) / (float)n + epsilon);
    for (int i = 0; i < n; i++) to[i] = x[i] * factor * weight[i];
}

static void norm_if(const float *x, const float *weight, int n, float epsilon, float *to) {
    if (weight) norm(x, weight, n, epsilon, to);
    else memcpy(to, x, n * sizeof(float));
}

static void rotate(float *x, const float *cos, const float *sin, int n, float scaling) {
    const int half = n / 2;
    for (int i = 0; i < half; i++) {
        const float a = x[i], b = x[i + half];
        x[i] = (a * cos[i] + b * sin[i]) * scaling;
        x[i + half] = (b * cos[i + half] + a * sin[i + half]) * scaling;
    }
}

/* silu(gate) * up into gate. */
static void gate(float *gates, const float *ups, int n) {
    for (int i = 0; i < n; i += LANES) {
        floats g = load_some(gates + i, n - i), u = load_some(ups + i, n - i);
        store_some(gates + i, g / (exponential(-g) + 1.0f) * u, n - i);
    }
}

/* Worker's share of `count` things: from *from to before the returned. */
static int share(int count, int worker, int workers, int *from) {
    *from = (int)((long)count * worker / workers);
    return (int)((long)count * (worker + 1) / workers);
}

static void multiply_share(const Work *w, const Product *p, float *out, int out_stride, int add, int worker, int workers) {
    int from, to = share(ROUND_UP(p->num_out, TILE) / TILE, worker, workers, &from);
    multiply(p, w->bytes, w->model->widest, w->scales, w->count, out, out_stride, add, from, to);
}

static void quantize_row(const Work *w, const Product *p, int t, const float *x) {
    w->scales[t] = quantize(x, p->num_in, w->bytes + (size_t)t * w->model->widest, offset_for(w->count, p->num_in));
}

/* Rotate query and key of one token and store key and value. */
static void place(const Work *w, const Layer *layer, int index, int t) {
    const Model *m = w->model;
    const Step *s = w->step;
    const int d = m->head_dim, token = w->start + t, at = s->rows[token] * s->num_layers + index;
    const float *cos = s->cos + (size_t)s->positions[token] * d, *sin = s->sin + (size_t)s->positions[token] * d;
    float *mixed = w->mixed + (size_t)t * widest_mixed(m);
    for (int h = 0; h < m->num_heads + m->num_kv_heads; h++) {
        const int is_key = h >= m->num_heads;
        float *x = mixed + h * d;
        if (layer->query_norm) norm(x, is_key ? layer->key_norm : layer->query_norm, d, m->epsilon, x);
        rotate(x, cos, sin, d, is_key ? 1.0f : layer->scaling);
    }
    for (int h = 0; h < m->num_kv_heads; h++) {
        const size_t offset = ((size_t)h * s->capacities[at] + s->slots[token]) * d;
        memcpy(s->keys[at] + offset, mixed + (m->num_heads + h) * d, d * sizeof(float));
        memcpy(s->values[at] + offset, mixed + (m->num_heads + m->num_kv_heads + h) * d, d * sizeof(float));
    }
}

static View view_of(const Work *w, const Layer *layer, int index, int t, int kv_head) {
    const Model *m = w->model;
    const Step *s = w->step;
    const int token = w->start + t, at = s->rows[token] * s->num_layers + index, end = s->positions[token] + 1;
    const size_t offset = (size_t)kv_head * s->capacities[at] * m->head_dim;
    return (View){s->keys[at] + offset, s->values[at] + offset, s->extras + s->extras_from[token], s->prefixes[token],
                  layer->window && end > layer->window ? end - layer->window : 0, end, m->head_dim};
}

/* The heads of one group, of `tokens` tokens from t on. */
static void attend_group(const Work *w, const Layer *layer, int index, int t, int tokens, int kv_head, float *scores) {
    const Model *m = w->model;
    const int d = m->head_dim, group = m->num_heads / m->num_kv_heads;
    View views[2];
    const View *seen[2] = {views, views + 1};
    const float *queries[2];
    float *outs[2];
    for (int i = 0; i < tokens; i++) {
        views[i] = view_of(w, layer, index, t + i, kv_head);
        queries[i] = w->mixed + (size_t)(t + i) * widest_mixed(m) + kv_head * group * d;
        outs[i] = w->attended + ((size_t)(t + i) * m->num_heads + kv_head * group) * d;
    }
    attend(seen, queries, tokens, group, scores, scores_room(w->step->longest), outs);
}

static void run_block(const Work *w, int worker, int workers) {
    const Model *m = w->model;
    const Step *s = w->step;
    const int size = m->hidden, wide = widest_mixed(m), heads = m->num_heads * m->head_dim;
    float *hidden = s->hidden + (size_t)w->start * size;
    float *scores = w->scores + scores_room(s->longest) * MOST_TOGETHER * worker;
    const int each = go_in_pairs(m->num_heads / m->num_kv_heads, m->head_dim) ? 2 : 1, parts = (w->count + each - 1) / each;
    int from, to = share(w->count, worker, workers, &from), first, last = share(parts * m->num_kv_heads, worker, workers, &first);
    for (int index = 0; index <= s->num_layers; index++) {
        if (s->taps[index])
            for (int t = from; t < to; t++)
                memcpy(s->taps[index] + (size_t)(w->start + t) * size, hidden + (size_t)t * size, size * sizeof(float));
        if (index == s->num_layers) break;
        const Layer *layer = m->layers + index;
        for (int t = from; t < to; t++) {
            norm_if(hidden + (size_t)t * size, layer->input_norm, size, m->epsilon, w->normed + (size_t)t * size);
            quantize_row(w, &layer->qkv, t, w->normed + (size_t)t * size);
        }
        meet(workers);
        multiply_share(w, &layer->qkv, w->mixed, wide, 0, worker, workers);
        meet(workers);
        for (int t = from; t < to; t++) place(w, layer, index, t);
        meet(workers);
        for (int item = first; item < last; item++) {         /* head by head, so that its keys stay in a near cache */
            const int t = item % parts * each;
            attend_group(w, layer, index, t, w->count - t < each ? w->count - t : each, item / parts, scores);
        }
        meet(workers);
        for (int t = from; t < to; t++) quantize_row(w, &layer->out, t, w->attended + (size_t)t * heads);
        meet(workers);
        multiply_share(w, &layer->out, hidden, size, 1, worker, workers);
        meet(workers);
        for (int t = from; t < to; t++) {
            norm(hidden + (size_t)t * size, layer->mlp_norm, size, m->epsilon, w->normed + (size_t)t * size);
            quantize_row(w, &layer->gate_up, t, w->normed + (size_t)t * size);
        }
        meet(workers);
        multiply_share(w, &layer->gate_up, w->gates, 2 * m->intermediate, 0, worker, workers);
        meet(workers);
        for (int t = from; t < to; t++) {
            float *gates = w->gates + (size_t)t * 2 * m->intermediate;
            gate(gates, gates + m->intermediate, m->intermediate);
            quantize_row(w, &layer->down, t, gates);
        }
        meet(workers);
        multiply_share(w, &layer->down, hidden, size, 1, worker, workers);
        meet(workers);
    }
    for (int t = from; t < to; t++)
        norm_if(hidden + (size_t)t * size, m->final_norm, size, m->epsilon, s->normed + (size_t)(w->start + t) * size);
    meet(workers);
}

/* hidden = from_token(embedding) + from_state(state) for the block's tokens. */
static void join(const Work *w, int worker, int workers) {
    const Head *head = w->head;
    const Guess *guess = w->guess;
    const int size = w->model->hidden;
    float *hidden = w->step->hidden + (size_t)w->start * size;
    int from, to = share(w->count, worker, workers, &from);
    for (int t = from; t < to; t++) quantize_row(w, &head->from_token, t, head->embeddings + (size_t)guess->tokens[w->start + t] * size);
    meet(workers);
    multiply_share(w, &head->from_token, hidden, size, 0, worker, workers);
    meet(workers);
    for (int t = from; t < to; t++) quantize_row(w, &head->from_state, t, guess->states + (size_t)(w->start + t) * size);
    meet(workers);
    multiply_share(w, &head->from_state, hidden, size, 1, worker, workers);
    meet(workers);
}

static void step_job(void *data, int worker, int workers) {
    Work work = *(Work *)data;
    for (work.start = 0; work.start < work.step->num_tokens; work.start += BLOCK) {
        work.count = work.step->num_tokens - work.start < BLOCK ? work.step->num_tokens - work.start : BLOCK;
        if (work.head) join(&work, worker, workers);
        run_block(&work, worker, workers);
    }
}

/* Bytes of scratch that a step needs. */
EXPORT int64_t specviz_scratch(const Model *model, int32_t longest, int32_t num_threads) {
    return (int64_t)lay_out(model, longest, num_threads < MOST_WORKERS ? num_threads : MOST_WORKERS, NULL, NULL);
}

EXPORT void specviz_step(const Model *model, const Step *step, int32_t num_threads) {
    Work work = {.model = model, .step = step};
    const int workers = num_threads < MOST_WORKERS ? num_threads : MOST_WORKERS;
    lay_out(model, step->longest, workers, step->scratch, &work);
    together(step_job, &work, workers);
}

typedef struct {
    const Product *product;
    const float *x;
    float *out, *scales;
    uint8_t *bytes;
    int32_t num_rows;
} Single;

static void single_job(void *data, int worker, int workers) {
    const Single *s = data;
    const Product *p = s->product;
    int from, to = share(s->num_rows, worker, workers, &from);
    for (int r = from; r < to; r++)
        s->scales[r] = quantize(s->x + (size_t)r * p->num_in, p->num_in, s->bytes + (size_t)r * p->num_in,
                                offset_for(s->num_rows, p->num_in));
    meet(workers);
    to = share(ROUND_UP(p->num_out, TILE) / TILE, worker, workers, &from);
    multiply(p, s->bytes, p->num_in, s->scales, s->num_rows, s->out, p->num_out, 0, from, to);
}

/* x [num_rows][num_in] -> out [num_rows][num_out]. bytes: room for num_rows rounded up to 16 rows of int8; scales: one float a row. */
EXPORT void specviz_product(const Product *product, const float *x, float *out, uint8_t *bytes, float *scales, int32_t num_rows,
                            int32_t num_threads) {
    Single single = {product, x, out, scales, bytes, num_rows};
    together(single_job, &single, num_threads);
}

/* ---- a drafting head in one call ----------------------------------------------------------------------------------------------------- */
static float log_of_sum(const float *x, int n) {
    float most = x[0];
    for (int i = 1; i < n; i++) most = x[i] > most ? x[i] : most;
    floats sums = all(0.0f);
    int i = 0;
    for (; i + LANES <= n; i += LANES) sums += exponential(load(x + i) - most);
    float sum = sum_of(sums);
    for (; i < n; i++) sum += expf(x[i] - most);
    return most + logf(sum);
}

static void best_of(const float *x, int n, int count, int32_t *best) {
    int found = 0;
    for (int i = 0; i < n; i++) {
        if (found == count && !(x[i] > x[best[count - 1]])) continue;
        int at = found < count ? found++ : count - 1;
        for (; at > 0 && x[i] > x[best[at - 1]]; at--) best[at] = best[at - 1];
        best[at] = i;
    }
}

static void guess_job(void *data, int worker, int workers) {
    Work work = *(Work *)data;
    const Guess *guess = work.guess;
    const Product *vocabulary = &work.head->vocabulary;
    const int words = vocabulary->num_out, size = work.model->hidden;
    step_job(data, worker, workers);
    for (work.start = 0; work.start < guess->num_wanted; work.start += BLOCK) {
        work.count = guess->num_wanted - work.start < BLOCK ? guess->num_wanted - work.start : BLOCK;
        float *logits = guess->logits + (size_t)work.start * words;
        int from, to = share(work.count, worker, workers, &from);
        for (int t = from; t < to; t++)
            quantize_row(&work, vocabulary, t, work.step->normed + (size_t)guess->wanted[work.start + t] * size);
        meet(workers);
        multiply_share(&work, vocabulary, logits, words, 0, worker, workers);
        meet(workers);
        for (int t = from; t < to; t++) {
            guess->sums[work.start + t] = log_of_sum(logits + (size_t)t * words, words);
            best_of(logits + (size_t)t * words, words, guess->num_best, guess->best + (size_t)(work.start + t) * guess->num_best);
        }
        meet(workers);
    }
}

/* As specviz_step, whose `hidden` is made here, and then the guesses behind the wanted tokens. num_best is at most `words`. */
EXPORT void specviz_guess(const Model *model, const Step *step, const Head *head, const Guess *guess, int32_t num_threads) {
    Work work = {.model = model, .step = step, .head = head, .guess = guess};
    const int workers = num_threads < MOST_WORKERS ? num_threads : MOST_WORKERS;
    lay_out(model, step->longest, workers, step->scratch, &work);
    together(guess_job, &work, workers);
}

/* Ask for large pages for memory that nothing was written to yet: weights are read whole for every step, and small pages cost a third of
   the speed of that (measured). */
EXPORT void specviz_large_pages(void *memory, int64_t num_bytes) {
#if defined(MADV_HUGEPAGE)
    madvise(memory, (size_t)num_bytes, MADV_HUGEPAGE);
#else
    (void)memory, (void)num_bytes;
#endif
}

/* Which kernel was compiled, and whether the tile registers may be used. */
EXPORT const char *specviz_kernel(void) { return tiles_allowed() ? KERNEL " AMX" : KERNEL; }
EXPORT int64_t specviz_sizes(void) {
    int64_t sizes = 0;
    const size_t all_sizes[] = {sizeof(Product), sizeof(Layer), sizeof(Model), sizeof(Step), sizeof(Head), sizeof(Guess)};
    for (size_t i = 0; i < sizeof all_sizes / sizeof *all_sizes; i++) sizes = sizes * 1000 + (int64_t)all_sizes[i];
    return sizes;
}

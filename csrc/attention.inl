// Paged causal attention: softmax(scale * q.k) v, online over tiles of 64 keys (Milakov and
// Gimelshein 2018), in splits of 512 keys that are merged in order (as flash decoding does).
//
// Tile and split borders are absolute positions, and every (query, head) row does its own
// arithmetic in key order, so chunk size, batch and threads cannot change a bit. The rows of a tile
// share each load of K and V: all query heads of the KV head, times the query tokens of the tile.
//
// Layout of one page of one KV head: K as [head_dim][PAGE], so that 16 keys are the lanes of one
// vector and a score needs no horizontal sum; then V as [PAGE][head_dim].
// Bound: KV bytes at decode, FMA throughput in prefill.
namespace headrace {
namespace HR_ISA {

constexpr int KEY_TILE = 64;
constexpr int TILE_PAGES = KEY_TILE / PAGE;
constexpr int ROWS = 4;                           // query rows that share loads
constexpr int SCORE_PAGES = LANES == 16 ? 4 : 1;  // pages per pass: what the registers hold
constexpr int VALUE_VECTORS = LANES == 16 ? 4 : 1;

struct RowState {
    float max, sum;
    int lo, hi;  // keys this row may see: [lo, hi)
};

struct Rows {
    float q[ROWS][MAX_HEAD_DIM];      // scaled
    float acc[ROWS][MAX_HEAD_DIM];    // of the split
    float total[ROWS][MAX_HEAD_DIM];  // of all splits so far
    float p[ROWS][KEY_TILE];          // scores, then probabilities
    RowState split[ROWS];
    RowState all[ROWS];
};

template <class T>
HR_INLINE const T* page_pointer(const AttendArgs& a, int key) {
    return static_cast<const T*>(a.kv) + static_cast<size_t>(a.pages[key / PAGE]) * a.page_elements;
}

// p[m][page * 16 ..] = q[m] . k for NP pages from `key` on.
template <class T, int M, int NP>
HR_INLINE void score_pages(const AttendArgs& a, int key, Rows& r, int at) {
    V s[M][NP];
    const T* k[NP];
    HR_UNROLL for (int j = 0; j < NP; j++) {
        k[j] = page_pointer<T>(a, key + j * PAGE);
        HR_UNROLL for (int m = 0; m < M; m++) s[m][j] = v_zero();
    }
    for (int d = 0; d < a.head_dim; d++) {
        HR_UNROLL for (int j = 0; j < NP; j++) {
            V kd = v_load(k[j] + d * PAGE);
            HR_UNROLL for (int m = 0; m < M; m++) s[m][j] = v_fma(v_set1(r.q[m][d]), kd, s[m][j]);
        }
    }
    HR_UNROLL for (int j = 0; j < NP; j++) HR_UNROLL for (int m = 0; m < M; m++)
        v_store(&r.p[m][at + j * PAGE], s[m][j]);
}

template <class T, int M>
HR_INLINE void score_tile(const AttendArgs& a, int tile, int end, Rows& r) {
    int pages = (imin(end - tile, KEY_TILE) + PAGE - 1) / PAGE;
    int j = 0;
    for (; j + SCORE_PAGES <= pages; j += SCORE_PAGES)
        score_pages<T, M, SCORE_PAGES>(a, tile + j * PAGE, r, j * PAGE);
    for (; j < pages; j++) score_pages<T, M, 1>(a, tile + j * PAGE, r, j * PAGE);
}

// Keys [lo, hi) of the tile count; scores become probabilities, acc and sum are rescaled.
HR_INLINE void softmax_tile(const AttendArgs& a, RowState& s, float* p, float* acc, int lo,
                            int hi) {
    if (a.softcap > 0.0f) {
        for (int i = 0; i < KEY_TILE; i += 16) {  // c * tanh(x / c) = c - 2c / (exp(2x / c) + 1)
            V e = v_exp(v_mul(v_load(p + i), v_set1(2.0f / a.softcap)));
            V d = v_div(v_set1(2.0f * a.softcap), v_add(e, v_set1(1.0f)));
            v_store(p + i, v_sub(v_set1(a.softcap), d));
        }
    }
    for (int i = 0; i < lo; i++) p[i] = -INFINITY;
    for (int i = hi; i < KEY_TILE; i++) p[i] = -INFINITY;
    V m = v_max(v_max(v_load(p), v_load(p + 16)), v_max(v_load(p + 32), v_load(p + 48)));
    float top = v_hmax(m);
    top = top > s.max ? top : s.max;
    float keep = exp1(s.max - top);
    V sum = v_zero();
    for (int i = 0; i < KEY_TILE; i += 16) {
        V e = v_exp(v_sub(v_load(p + i), v_set1(top)));
        v_store(p + i, e);
        sum = v_add(sum, e);
    }
    s.sum = s.sum * keep + v_sum(sum);
    s.max = top;
    if (keep == 1.0f) return;
    for (int d = 0; d < a.head_dim; d += 16) v_store(acc + d, v_mul(v_load(acc + d), v_set1(keep)));
}

// acc[m][d ..] += p[m][key] * v[key][d ..] for keys [begin, end) of the tile, rows [m0, m0 + M).
template <class T, int M, int NV>
HR_INLINE void value_block(const AttendArgs& a, int tile, int begin, int end, Rows& r, int m0,
                           int d) {
    V acc[M][NV];
    HR_UNROLL for (int m = 0; m < M; m++) HR_UNROLL for (int i = 0; i < NV; i++) acc[m][i] =
        v_load(&r.acc[m0 + m][d + 16 * i]);
    int key = begin;
    while (key < end) {
        const T* page = page_pointer<T>(a, tile + key) + PAGE * a.head_dim + d;
        int stop = imin(end, (key / PAGE + 1) * PAGE);
        for (; key < stop; key++) {
            const T* v = page + (key % PAGE) * a.head_dim;
            HR_UNROLL for (int i = 0; i < NV; i++) {
                V vd = v_load(v + 16 * i);
                HR_UNROLL for (int m = 0; m < M; m++) acc[m][i] =
                    v_fma(v_set1(r.p[m0 + m][key]), vd, acc[m][i]);
            }
        }
    }
    HR_UNROLL for (int m = 0; m < M; m++) HR_UNROLL for (int i = 0; i < NV; i++)
        v_store(&r.acc[m0 + m][d + 16 * i], acc[m][i]);
}

template <class T, int M>
HR_INLINE void value_rows(const AttendArgs& a, int tile, int begin, int end, Rows& r, int m0) {
    if (begin >= end) return;
    int d = 0;
    for (; d + 16 * VALUE_VECTORS <= a.head_dim; d += 16 * VALUE_VECTORS)
        value_block<T, M, VALUE_VECTORS>(a, tile, begin, end, r, m0, d);
    for (; d < a.head_dim; d += 16) value_block<T, M, 1>(a, tile, begin, end, r, m0, d);
}

// A row touches only keys it may see: what stands in other slots of a page (another request's
// leftovers, NaN even) cannot reach it. All rows share the common range, the edges go row by row.
template <class T, int M>
HR_INLINE void value_tile(const AttendArgs& a, int tile, const int* lo, const int* hi, Rows& r) {
    int begin = 0, end = KEY_TILE;
    for (int m = 0; m < M; m++) {
        begin = imax(begin, lo[m]);
        end = imin(end, hi[m]);
    }
    if (begin >= end) {
        for (int m = 0; m < M; m++) value_rows<T, 1>(a, tile, lo[m], hi[m], r, m);
        return;
    }
    for (int m = 0; m < M; m++) value_rows<T, 1>(a, tile, lo[m], begin, r, m);
    value_rows<T, M>(a, tile, begin, end, r, 0);
    for (int m = 0; m < M; m++) value_rows<T, 1>(a, tile, end, hi[m], r, m);
}

// total and t take in one more split: its weighted values, largest score and sum.
HR_INLINE void merge_split(float* total, RowState& t, const float* acc, float max, float sum,
                           int head_dim) {
    if (sum == 0.0f) return;  // saw no key
    if (t.sum == 0.0f) {
        memcpy(total, acc, sizeof(float) * static_cast<size_t>(head_dim));
        t.max = max;
        t.sum = sum;
        return;
    }
    float top = t.max > max ? t.max : max;
    float old_weight = exp1(t.max - top), new_weight = exp1(max - top);
    for (int d = 0; d < head_dim; d += 16) {
        V old_part = v_mul(v_load(total + d), v_set1(old_weight));
        v_store(total + d, v_fma(v_load(acc + d), v_set1(new_weight), old_part));
    }
    t.sum = t.sum * old_weight + sum * new_weight;
    t.max = top;
}

HR_INLINE void start_split(const AttendArgs& a, Rows& r, int rows) {
    for (int m = 0; m < rows; m++) {
        r.split[m].max = -INFINITY;
        r.split[m].sum = 0.0f;
        for (int d = 0; d < a.head_dim; d += 16) v_store(&r.acc[m][d], v_zero());
    }
}

template <class T, int M>
static void attend_split(const AttendArgs& a, int begin, int end, Rows& r) {
    start_split(a, r, M);
    for (int tile = begin & ~(KEY_TILE - 1); tile < end; tile += KEY_TILE) {
        int lo[M], hi[M];
        score_tile<T, M>(a, tile, end, r);
        for (int m = 0; m < M; m++) {
            lo[m] = imax(r.all[m].lo - tile, 0);
            hi[m] = imin(r.all[m].hi - tile, KEY_TILE);
            if (lo[m] < hi[m]) {
                softmax_tile(a, r.split[m], r.p[m], r.acc[m], lo[m], hi[m]);
            } else {
                lo[m] = hi[m] = 0;
            }
        }
        value_tile<T, M>(a, tile, lo, hi, r);
    }
}

HR_INLINE float* row_out(const AttendArgs& a, int row) {
    return a.out + static_cast<size_t>(row / a.group) * a.out_stride + row % a.group * a.head_dim;
}

HR_INLINE void store_row(float* out, const float* total, float sum, int head_dim) {
    V inverse = v_set1(1.0f / sum);
    for (int d = 0; d < head_dim; d += 16) v_store(out + d, v_mul(v_load(total + d), inverse));
}

// Scaled queries and key ranges of rows [row, row + M); returns the range of all of them.
template <int M>
HR_INLINE void load_rows(const AttendArgs& a, int row, Rows& r, int* begin, int* end) {
    *begin = 1 << 30;
    *end = 0;
    for (int m = 0; m < M; m++) {
        int token = (row + m) / a.group, head = (row + m) % a.group;
        const float* q = a.q + static_cast<size_t>(token) * a.q_stride + head * a.head_dim;
        for (int d = 0; d < a.head_dim; d++) r.q[m][d] = q[d] * a.scale;
        RowState& s = r.all[m];
        s.hi = a.position + token + 1;
        s.lo = a.window > 0 ? imax(s.hi - a.window, 0) : 0;
        s.sum = 0.0f;
        s.max = -INFINITY;
        *begin = imin(*begin, s.lo);
        *end = imax(*end, s.hi);
    }
}

// Rows [row, row + M) of the tile: row = token * group + head.
template <class T, int M>
static void attend_rows(const AttendArgs& a, int row) {
    Rows r;
    int begin, end;
    load_rows<M>(a, row, r, &begin, &end);
    if (a.partial) {  // one split of several that other threads take
        int at = a.split * SPLIT;
        attend_split<T, M>(a, imax(begin, at), imin(end, at + SPLIT), r);
        for (int m = 0; m < M; m++) {
            float* p = a.partial + static_cast<size_t>(row + m) * partial_stride(a.head_dim);
            memcpy(p, r.acc[m], sizeof(float) * static_cast<size_t>(a.head_dim));
            p[a.head_dim] = r.split[m].max;
            p[a.head_dim + 1] = r.split[m].sum;
        }
        return;
    }
    for (int at = begin & ~(SPLIT - 1); at < end; at += SPLIT) {
        attend_split<T, M>(a, imax(begin, at), imin(end, at + SPLIT), r);
        for (int m = 0; m < M; m++)
            merge_split(r.total[m], r.all[m], r.acc[m], r.split[m].max, r.split[m].sum, a.head_dim);
    }
    for (int m = 0; m < M; m++)
        store_row(row_out(a, row + m), r.total[m], r.all[m].sum, a.head_dim);
}

// `splits` partial results per row, merged in order: the arithmetic of attend_rows.
static void attend_merge(const AttendArgs& a, int splits) {
    float total[MAX_HEAD_DIM];
    const size_t stride = partial_stride(a.head_dim);
    const size_t rows = static_cast<size_t>(a.tokens) * a.group;
    for (size_t row = 0; row < rows; row++) {
        RowState t{-INFINITY, 0.0f, 0, 0};
        for (int s = 0; s < splits; s++) {
            const float* p = a.partial + (static_cast<size_t>(s) * rows + row) * stride;
            merge_split(total, t, p, p[a.head_dim], p[a.head_dim + 1], a.head_dim);
        }
        store_row(row_out(a, static_cast<int>(row)), total, t.sum, a.head_dim);
    }
}

template <class T>
static void attend_as(const AttendArgs& a) {
    int rows = a.tokens * a.group, row = 0;
    for (; row + ROWS <= rows; row += ROWS) attend_rows<T, ROWS>(a, row);
    switch (rows - row) {
        case 1: return attend_rows<T, 1>(a, row);
        case 2: return attend_rows<T, 2>(a, row);
        case 3: return attend_rows<T, 3>(a, row);
        default: return;
    }
}

static void attend(const AttendArgs& a) {
    if (a.is_f16) {
        attend_as<uint16_t>(a);
    } else {
        attend_as<float>(a);
    }
}

HR_INLINE void put(float* p, float x) { *p = x; }
HR_INLINE void put(uint16_t* p, float x) { *p = float_to_half(x); }

template <class T>
static void kv_write_as(const KvWriteArgs& a) {
    const size_t head_elements = 2u * PAGE * static_cast<size_t>(a.head_dim);
    T* page = static_cast<T*>(a.kv) + static_cast<size_t>(a.page) * a.page_elements;
    for (int h = 0; h < a.num_kv_heads; h++, page += head_elements) {
        const float* k = a.k + h * a.head_dim;
        const float* v = a.v + h * a.head_dim;
        T* values = page + (PAGE + a.slot) * a.head_dim;
        for (int d = 0; d < a.head_dim; d++) put(page + d * PAGE + a.slot, k[d]);
        for (int d = 0; d < a.head_dim; d++) put(values + d, v[d]);
    }
}

static void kv_write(const KvWriteArgs& a) {
    if (a.is_f16) {
        kv_write_as<uint16_t>(a);
    } else {
        kv_write_as<float>(a);
    }
}

}  // namespace HR_ISA
}  // namespace headrace

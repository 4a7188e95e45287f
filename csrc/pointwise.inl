// Gates, rotary embedding, soft cap: one row at a time, elementwise, no reduction.
namespace headrace {
namespace HR_ISA {

HR_INLINE V sigmoid_times(V x, V u) {  // x / (1 + exp(-u))
    V e = v_exp(v_sub(v_zero(), u));
    return v_div(x, v_add(v_set1(1.0f), e));
}

// gelu_tanh(x) = x * sigmoid(2 u), u = sqrt(2 / pi) (x + 0.044715 x^3): the tanh form, rewritten.
HR_INLINE V gelu_tanh(V x) {
    V cube = v_mul(v_mul(x, x), x);
    V inner = v_fma(cube, v_set1(0.044715f), x);
    return sigmoid_times(x, v_mul(inner, v_set1(1.5957691216057308f)));
}

template <bool GELU>
HR_INLINE void gate_row(const float* gate, const float* up, int n, float* y) {
    for (int i = 0; i < n; i += 16) {
        int left = imin(16, n - i);
        bool whole = left == 16;
        V g = whole ? v_load(gate + i) : v_load_part(gate + i, left, 0.0f);
        V u = whole ? v_load(up + i) : v_load_part(up + i, left, 0.0f);
        V r = v_mul(GELU ? gelu_tanh(g) : sigmoid_times(g, g), u);
        if (whole) {
            v_store(y + i, r);
        } else {
            v_store_part(y + i, r, left);
        }
    }
}

static void silu_mul(const float* gate, const float* up, int n, float* y) {
    gate_row<false>(gate, up, n, y);
}
static void gelu_tanh_mul(const float* gate, const float* up, int n, float* y) {
    gate_row<true>(gate, up, n, y);
}

static void softcap(const float* x, int n, float cap, float* y) {
    for (int i = 0; i < n; i += 16) {
        int left = imin(16, n - i);
        V a = left == 16 ? v_load(x + i) : v_load_part(x + i, left, 0.0f);
        V e = v_exp(v_mul(a, v_set1(2.0f / cap)));
        V r = v_sub(v_set1(cap), v_div(v_set1(2.0f * cap), v_add(e, v_set1(1.0f))));
        if (left == 16) {
            v_store(y + i, r);
        } else {
            v_store_part(y + i, r, left);
        }
    }
}

// cos_sin: [rotary_dim / 2] cosines, then as many sines.
static void rope(const float* x, const float* cos_sin, int heads, int head_dim, int rotary_dim,
                 bool is_interleaved, float* y) {
    const int half = rotary_dim / 2;
    const float* c = cos_sin;
    const float* s = cos_sin + half;
    for (int h = 0; h < heads; h++, x += head_dim, y += head_dim) {
        for (int i = 0; i < half; i++) {
            int a = is_interleaved ? 2 * i : i, b = is_interleaved ? 2 * i + 1 : i + half;
            float x0 = x[a], x1 = x[b];
            y[a] = x0 * c[i] - x1 * s[i];
            y[b] = x1 * c[i] + x0 * s[i];
        }
        for (int i = rotary_dim; i < head_dim; i++) y[i] = x[i];
    }
}

static void exp_row(const float* x, int n, float* y) {
    for (int i = 0; i < n; i += 16) {
        int left = imin(16, n - i);
        v_store_part(y + i, v_exp(v_load_part(x + i, left, 0.0f)), left);
    }
}

}  // namespace HR_ISA
}  // namespace headrace

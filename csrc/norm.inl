// RMS norm of one row: y = x * (1 / sqrt(mean(x^2) + eps)) * weight (Zhang and Sennrich 2019).
// The sum runs over 16 lanes in order, then halves: one order on every ISA.
namespace headrace {
namespace HR_ISA {

static void rms_norm(const float* x, const float* weight, int n, float eps, float* y) {
    V sum = v_zero();
    int i = 0;
    for (; i + 16 <= n; i += 16) {
        V a = v_load(x + i);
        sum = v_fma(a, a, sum);
    }
    if (i < n) {
        V a = v_load_part(x + i, n - i, 0.0f);
        sum = v_fma(a, a, sum);
    }
    float factor = 1.0f / sqrtf(v_sum(sum) / static_cast<float>(n) + eps);
    if (weight) {
        for (i = 0; i < n; i++) y[i] = x[i] * factor * weight[i];
    } else {
        for (i = 0; i < n; i++) y[i] = x[i] * factor;
    }
}

}  // namespace HR_ISA
}  // namespace headrace

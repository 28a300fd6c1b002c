// Forward and backward passes of a small decoder (Qwen2, Llama, GPT-2) in float32 on one core, for `compiled.py`.
//
// Rows are packed: no padding is computed. They are taken in groups of about a hundred tokens, whose activations stay in
// the processor's second cache from one layer's step to the next, where a step over a whole minibatch waits for memory.
// Plain C++17 with the vector types of GCC and Clang; no header of PyTorch, so that it compiles in seconds.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <utility>
#include <vector>

namespace {

// Floats in a vector, and how many of these the registers hold. A wider vector than the processor's is one of several
// registers, which the compilers spill to memory: measured on AVX2 with 16 floats, tenfold time.
#if defined(__AVX512F__)
constexpr long W = 16, REGISTERS = 32;
#elif defined(__AVX__)
constexpr long W = 8, REGISTERS = 16;
#elif defined(__aarch64__)
constexpr long W = 4, REGISTERS = 32;
#else
constexpr long W = 4, REGISTERS = 16;
#endif
typedef float vec __attribute__((vector_size(4 * W), aligned(4), may_alias));
typedef int32_t ivec __attribute__((vector_size(4 * W)));
typedef float aligned_vec __attribute__((vector_size(4 * W)));

inline long up(long n) { return (n + W - 1) / W * W; }
inline aligned_vec load(const float* p) { return *reinterpret_cast<const vec*>(p); }
inline void store(float* p, aligned_vec v) { *reinterpret_cast<vec*>(p) = v; }
inline aligned_vec splat(float x) { return x - aligned_vec{}; }  // x + 0 is no broadcast, for -0: slower by two thirds

inline float sum(aligned_vec v) {
    float lanes[W];
    std::memcpy(lanes, &v, sizeof lanes);
    for (long n = W / 2; n >= 4; n /= 2)
        for (long i = 0; i < n; i++) lanes[i] += lanes[i + n];
    return (lanes[0] + lanes[1]) + (lanes[2] + lanes[3]);
}

inline float dot(const float* x, const float* y, long n) {
    aligned_vec lanes{};
    long i = 0;
    for (; i + W <= n; i += W) lanes += load(x + i) * load(y + i);
    float s = i ? sum(lanes) : 0.f;
    for (; i < n; i++) s += x[i] * y[i];
    return s;
}

// e^x within 2 units in the last place (Cephes' polynomial); NaN stays NaN, what is below -87.3 becomes e^-87.3.
inline aligned_vec exp_of(aligned_vec x) {
    const aligned_vec low = splat(-87.3f), high = splat(88.7f);
    const aligned_vec top = splat(INFINITY);
    const ivec over = x > high;
    x = x < low ? low : x;
    x = x > high ? high : x;
    const aligned_vec shift = splat(12582912.f);  // 1.5 * 2^23: adding it rounds to an integer
    const aligned_vec n = (x * 1.44269504f + shift) - shift;
    x = x - n * 0.693359375f;
    x = x + n * 2.12194440e-4f;
    aligned_vec p = splat(1.9875691500e-4f);
    p = p * x + 1.3981999507e-3f;
    p = p * x + 8.3334519073e-3f;
    p = p * x + 4.1665795894e-2f;
    p = p * x + 1.6666665459e-1f;
    p = p * x + 5.0000001201e-1f;
    p = p * (x * x) + x + 1.0f;
    const ivec exponent = (__builtin_convertvector(n, ivec) + 127) << 23;
    aligned_vec scale;
    std::memcpy(&scale, &exponent, sizeof scale);
    p = p * scale;
    return over ? top : p;
}

inline aligned_vec sigmoid(aligned_vec x) { return 1.0f / (1.0f + exp_of(-x)); }

// ---- matrix products: C (m x n) [+]= A (m x k) B (k x n) -----------------------------------------------------------
// A has any strides, the rows of B and C are contiguous, n is a multiple of W.

template <int R, int C>
inline void tile(const float* a, long row, long column, const float* b, long ldb, float* c, long ldc, long k, bool add) {
    aligned_vec s[R][C];
    for (int r = 0; r < R; r++)
        for (int j = 0; j < C; j++) s[r][j] = add ? load(c + r * ldc + j * W) : aligned_vec{};
    for (long i = 0; i < k; i++) {
        aligned_vec line[C];
        for (int j = 0; j < C; j++) line[j] = load(b + i * ldb + j * W);
        for (int r = 0; r < R; r++) {
            const aligned_vec x = splat(a[r * row + i * column]);
            for (int j = 0; j < C; j++) s[r][j] += x * line[j];
        }
    }
    for (int r = 0; r < R; r++)
        for (int j = 0; j < C; j++) store(c + r * ldc + j * W, s[r][j]);
}

// The last m <= R rows at once, so that B is read once.
template <int R, int C>
inline void rest(const float* a, long row, long column, const float* b, long ldb, float* c, long ldc, long m, long k,
                 bool add) {
    if constexpr (R > 0) {
        if (m == R) tile<R, C>(a, row, column, b, ldb, c, ldc, k, add);
        else rest<R - 1, C>(a, row, column, b, ldb, c, ldc, m, k, add);
    }
}

template <int C>
inline void columns(const float* a, long row, long column, const float* b, long ldb, float* c, long ldc, long m, long k,
                    bool add) {
    // Sums, a line of B and one of A's numbers stay in registers.
    constexpr int R = REGISTERS == 16 ? 12 / C : C == 1 ? 12 : C == 2 ? 8 : 6;
    long r = 0;
    for (; r + R <= m; r += R) tile<R, C>(a + r * row, row, column, b, ldb, c + r * ldc, ldc, k, add);
    rest<R - 1, C>(a + r * row, row, column, b, ldb, c + r * ldc, ldc, m - r, k, add);
}

void gemm(const float* a, long row, long column, const float* b, long ldb, float* c, long ldc, long m, long n, long k,
          bool add) {
    for (long j = 0; j < n;) {
        const long left = (n - j) / W;
        if (m == 1 && left >= 8) tile<1, 8>(a, row, column, b + j, ldb, c + j, ldc, k, add), j += 8 * W;
        else if ((REGISTERS > 16 || m == 1) && left >= 4) columns<4>(a, row, column, b + j, ldb, c + j, ldc, m, k, add), j += 4 * W;
        else if (left == 3) columns<3>(a, row, column, b + j, ldb, c + j, ldc, m, k, add), j += 3 * W;
        else if (left >= 2) columns<2>(a, row, column, b + j, ldb, c + j, ldc, m, k, add), j += 2 * W;
        else columns<1>(a, row, column, b + j, ldb, c + j, ldc, m, k, add), j += W;
    }
}

// A weight (n x k), packed in panels of 64 columns so that a panel fits the first cache: for x W^T (k x n) and for
// dy W (n x k).
struct Packed {
    std::vector<float> data;
    long k = 0, n = 0;

    void reserve(long depth, long width) {
        k = depth, n = up(width);
        data.assign(k * n, 0.f);
    }
    long width(long j) const { return std::min<long>(64, n - j / 64 * 64); }  // of the panel of column j
    float* at(long i, long j) { return data.data() + j / 64 * 64 * k + i * width(j) + j % 64; }
    void apply(const float* a, long lda, float* c, long ldc, long m, bool add) const {
        for (long j = 0; j < n; j += 64) {
            gemm(a, lda, 1, data.data() + j * k, width(j), c + j, ldc, m, width(j), k, add);
        }
    }
};

void pack_forward(Packed& p, long first, const float* w, long n, long k) {
    for (long j = 0; j < n; j++) {
        float* to = p.at(0, first + j);
        for (long i = 0, width = p.width(first + j); i < k; i++) to[i * width] = w[j * k + i];
    }
}

void pack_backward(Packed& p, long first, const float* w, long n, long k) {
    for (long j = 0; j < k; j += 64)
        for (long i = 0; i < n; i++) std::copy(w + i * k + j, w + i * k + std::min(k, j + 64), p.at(first + i, j));
}

// ---- the decoder ---------------------------------------------------------------------------------------------------

// Filled by compiled.py; 
struct Model {
    int64_t hidden, layers, heads, kv_heads, head_size, inner, layer_norm, gated;
    double epsilon;
    const float *cosine, *sine;  // (positions, head_size / 2), null without rotary positions
};

enum { EMBED, PLACES, NORM, NORM_BIAS, FIRST };  // then, for each layer:
enum { N1, N1B, Q, QB, K, KB, V, VB, O, OB, N2, N2B, G, GB, U, UB, D, DB, PER_LAYER };

struct Layer {
    Packed q, kv, o, up_gate, down, q_back, kv_back, o_back, up_gate_back, down_back;
    std::vector<float> q_bias, kv_bias, gate_bias;
};

struct Body {
    Model m;
    const float* const* w;
    long H, Q_, KV, I, GI, dp, half;
    std::vector<Layer> layers;

    const float* weight(long layer, long which) const { return w[FIRST + layer * PER_LAYER + which]; }

    Body(const Model& model, const float* const* weights, bool back) : m(model), w(weights) {
        H = m.hidden, Q_ = m.heads * m.head_size, KV = m.kv_heads * m.head_size;
        I = m.inner, GI = m.gated ? 2 * I : I, dp = up(m.head_size), half = m.head_size / 2;
        layers.resize(m.layers);
        for (long l = 0; l < m.layers; l++) {
            Layer& p = layers[l];
            const float *q = weight(l, Q), *k = weight(l, K), *v = weight(l, V), *g = weight(l, G), *u = weight(l, U);
            p.q.reserve(H, Q_), p.kv.reserve(H, 2 * KV), p.o.reserve(Q_, H), p.up_gate.reserve(H, GI);
            p.down.reserve(I, H);
            pack_forward(p.q, 0, q, Q_, H), pack_forward(p.kv, 0, k, KV, H);
            pack_forward(p.kv, KV, v, KV, H), pack_forward(p.o, 0, weight(l, O), H, Q_);
            if (m.gated) pack_forward(p.up_gate, 0, g, I, H);
            pack_forward(p.up_gate, GI - I, u, I, H), pack_forward(p.down, 0, weight(l, D), H, I);
            p.q_bias.assign(Q_, 0.f), p.kv_bias.assign(2 * KV, 0.f), p.gate_bias.assign(GI, 0.f);
            if (const float* b = weight(l, QB)) std::copy(b, b + Q_, p.q_bias.begin());
            if (const float* b = weight(l, KB)) std::copy(b, b + KV, p.kv_bias.begin());
            if (const float* b = weight(l, VB)) std::copy(b, b + KV, p.kv_bias.begin() + KV);
            if (const float* b = weight(l, GB)) std::copy(b, b + I, p.gate_bias.begin());
            if (const float* b = weight(l, UB)) std::copy(b, b + I, p.gate_bias.begin() + GI - I);
            if (!back) continue;
            p.q_back.reserve(Q_, H), p.kv_back.reserve(2 * KV, H), p.o_back.reserve(H, Q_);
            p.up_gate_back.reserve(GI, H), p.down_back.reserve(H, I);
            pack_backward(p.q_back, 0, q, Q_, H), pack_backward(p.kv_back, 0, k, KV, H);
            pack_backward(p.kv_back, KV, v, KV, H), pack_backward(p.o_back, 0, weight(l, O), H, Q_);
            if (m.gated) pack_backward(p.up_gate_back, 0, g, I, H);
            pack_backward(p.up_gate_back, GI - I, u, I, H), pack_backward(p.down_back, 0, weight(l, D), H, I);
        }
    }
};

// One row of a group: n new tokens after `past` ones whose keys and values are in the cache, and the ascending positions
// whose states are asked for: in the last layer these alone have queries, and all that follows attention.
struct Row {
    const int64_t *tokens, *asked;
    long n, n_asked, past, room;
    long first = 0, first_asked = 0;            // where it begins among the group's tokens
    float *keys = nullptr, *values = nullptr;  // (layers, kv_heads, dp, room) and (layers, kv_heads, room, dp)

    long queries(bool last) const { return last ? n_asked : n; }
    long begin(bool last) const { return last ? first_asked : first; }
    long position(bool last, long t) const { return last ? asked[t] : past + t; }
};

struct Group {
    std::vector<Row> rows;
    long M = 0, asked = 0;

    void add(Row r) {
        r.first = M, r.first_asked = asked, M += r.n, asked += r.n_asked;
        rows.push_back(r);
    }
};

// Floats that one layer keeps of a group of M tokens, for the way back: each at its offset.
struct Kept {
    long x, q, probs, o, mid, gate, size;
    Kept(const Body& b, long M, long squares) {
        long at = 0;
        auto take = [&](long n) { return std::exchange(at, at + up(n)); };
        x = take(M * b.H), q = take(M * b.m.heads * b.dp), probs = take(squares * b.m.heads);
        o = take(M * b.Q_), mid = take(M * b.H);
        gate = take(M * b.GI), size = at;
    }
    static long squares(const Group& g) {
        long total = 0;
        for (const Row& r : g.rows) total += r.n * up(r.past + r.n);
        return total;
    }
};

// y = norm(x), and for each token its mean and the reciprocal of its spread (RMSNorm: mean 0).
void normalise(const Body& b, const float* x, const float* w, const float* bias, float* y, float* kept, long M) {
    for (long t = 0; t < M; t++) {
        const float* row = x + t * b.H;
        aligned_vec s{}, q{};
        float mean = 0;
        if (b.m.layer_norm) {
            for (long i = 0; i < b.H; i += W) s += load(row + i);
            mean = sum(s) / b.H;
        }
        for (long i = 0; i < b.H; i += W) {
            const aligned_vec d = load(row + i) - mean;
            q += d * d;
        }
        const float scale = 1.0f / std::sqrt(sum(q) / b.H + static_cast<float>(b.m.epsilon));
        kept[2 * t] = mean, kept[2 * t + 1] = scale;
        for (long i = 0; i < b.H; i += W) {
            aligned_vec v = load(w + i) * ((load(row + i) - mean) * scale);
            if (bias) v += load(bias + i);
            store(y + t * b.H + i, v);
        }
    }
}

// dx += the gradient through norm(x); adds to dw and dbias, and gives y again where it is asked for.
void normalise_back(const Body& b, const float* x, const float* w, const float* dy, const float* kept, float* dx,
                    float* dw, float* dbias, long M) {
    for (long t = 0; t < M; t++) {
        const float mean = kept[2 * t], scale = kept[2 * t + 1];
        aligned_vec along{}, plain{};
        for (long i = 0; i < b.H; i += W) {
            const aligned_vec n = (load(x + t * b.H + i) - mean) * scale, g = load(dy + t * b.H + i);
            store(dw + i, load(dw + i) + g * n);
            if (dbias) store(dbias + i, load(dbias + i) + g);
            along += g * load(w + i) * n, plain += g * load(w + i);
        }
        const float a = sum(along) / b.H, p = b.m.layer_norm ? sum(plain) / b.H : 0.f;
        for (long i = 0; i < b.H; i += W) {
            const aligned_vec n = (load(x + t * b.H + i) - mean) * scale;
            const aligned_vec g = load(dy + t * b.H + i) * load(w + i);
            store(dx + t * b.H + i, load(dx + t * b.H + i) + (g - n * a - p) * scale);
        }
    }
}

void add_bias(float* y, const float* bias, long M, long n) {
    for (long t = 0; t < M; t++)
        for (long i = 0; i < n; i += W) store(y + t * n + i, load(y + t * n + i) + load(bias + i));
}

void add_columns(const float* y, long ld, float* total, long M, long n) {
    for (long t = 0; t < M; t++)
        for (long i = 0; i < n; i++) total[i] += y[t * ld + i];
}

// Rotary positions of one head: (a, b) -> (a cos - b sin, b cos + a sin), or back with sign = -1.
inline void rotate(const Body& b, const float* from, float* __restrict to, long position, float sign) {
    const long h = b.half;
    if (!b.m.cosine) {
        std::copy(from, from + b.m.head_size, to);
        return;
    }
    const float *c = b.m.cosine + position * h, *s = b.m.sine + position * h;
    for (long i = 0; i < h; i++) {
        const float x = from[i], y = from[i + h];
        to[i] = x * c[i] - sign * y * s[i];
        to[i + h] = y * c[i] + sign * x * s[i];
    }
}

constexpr long ROWS = 12;  // queries that attend together

inline ivec lanes_in_order() {
    ivec v{};
    for (long i = 0; i < W; i++) v[i] = int(i);
    return v;
}
const ivec lane = lanes_in_order();

// The first n of `room` scores become probabilities, the others 0; room is a multiple of W.
inline void softmax_row(float* s, long n, long room, float scale) {
    aligned_vec tops = splat(-INFINITY), total{};
    for (long i = 0; i < room; i += W) {
        const aligned_vec x = lane + int(i) < int(n) ? load(s + i) : splat(-INFINITY);
        store(s + i, x);
        tops = x > tops ? x : tops;
    }
    float top = tops[0];
    for (long i = 1; i < W; i++) top = tops[i] > top ? tops[i] : top;
    for (long i = 0; i < room; i += W) {
        aligned_vec e = exp_of((load(s + i) - top) * scale);
        e = lane + int(i) < int(n) ? e : aligned_vec{};
        total += e;
        store(s + i, e);
    }
    const float part = 1.0f / sum(total);
    for (long i = 0; i < room; i += W) store(s + i, load(s + i) * part);
}

// Attention of one row in one layer from its queries and its keys and values: writes q (heads, queries, dp) and probs
// (heads, queries, keys), fills the cache, gives o.
void attend(const Body& b, const Row& r, long layer, bool last, const float* queries, const float* kv, float* q,
            float* probs, float* o) {
    const long d = b.m.head_size, dp = b.dp, group = b.m.heads / b.m.kv_heads;
    const long n = r.queries(last), all = r.past + r.n, ld = up(all);
    const float scale = 1.0f / std::sqrt(static_cast<float>(d));
    float line[512], mixed[ROWS * 512];
    for (long h = 0; h < b.m.kv_heads; h++) {
        float* kt = r.keys + (layer * b.m.kv_heads + h) * dp * r.room;
        float* v = r.values + (layer * b.m.kv_heads + h) * dp * r.room;
        for (long t = 0; t < r.n; t++) {
            const float* from = kv + t * 2 * b.KV + h * d;
            rotate(b, from, line, r.past + t, 1.f);
            for (long i = 0; i < d; i++) kt[i * r.room + r.past + t] = line[i];
            std::copy(from + b.KV, from + b.KV + d, v + (r.past + t) * dp);
            std::fill(v + (r.past + t) * dp + d, v + (r.past + t) * dp + dp, 0.f);
        }
        for (long i = 0; i < d; i++) std::fill(kt + i * r.room + all, kt + i * r.room + ld, 0.f);
    }
    for (long h = 0; h < b.m.heads; h++) {
        const float* kt = r.keys + (layer * b.m.kv_heads + h / group) * dp * r.room;
        const float* v = r.values + (layer * b.m.kv_heads + h / group) * dp * r.room;
        float *qh = q + h * n * dp, *ph = probs + h * n * ld;
        for (long t = 0; t < n; t++) {
            rotate(b, queries + t * b.Q_ + h * d, qh + t * dp, r.position(last, t), 1.f);
            std::fill(qh + t * dp + d, qh + (t + 1) * dp, 0.f);
        }
        for (long t = 0; t < n; t += ROWS) {
            const long m = std::min(ROWS, n - t), sees = r.position(last, t + m - 1) + 1, seen = up(sees);
            gemm(qh + t * dp, dp, 1, kt, r.room, ph + t * ld, ld, m, seen, d, false);
            for (long i = t; i < t + m; i++) {
                softmax_row(ph + i * ld, r.position(last, i) + 1, seen, scale);
                std::fill(ph + i * ld + seen, ph + (i + 1) * ld, 0.f);
            }
            gemm(ph + t * ld, ld, 1, v, dp, mixed, dp, m, dp, sees, false);
            for (long i = 0; i < m; i++) std::copy(mixed + i * dp, mixed + i * dp + d, o + (t + i) * b.Q_ + h * d);
        }
    }
}

// The gradients of the first nq queries of a row (no past), and of its first n keys and values, from that of o.
void attend_back(const Body& b, const Row& r, long n, long nq, long layer, bool last, const float* q,
                 const float* probs, const float* o, const float* d_o, float* d_queries, float* d_kv,
                 std::vector<float>& work) {
    const long d = b.m.head_size, dp = b.dp, group = b.m.heads / b.m.kv_heads, ld = up(r.n), whole = r.queries(last);
    const float scale = 1.0f / std::sqrt(static_cast<float>(d));
    work.assign(3 * n * dp + 2 * nq * dp + dp * ld + nq * ld, 0.f);
    float *k = work.data(), *dk = k + n * dp, *dv = dk + n * dp, *dout = dv + n * dp, *dq = dout + nq * dp;
    float *vt = dq + nq * dp, *ds = vt + dp * ld, line[512];
    for (long g = 0; g < b.m.kv_heads; g++) {
        const float* kt = r.keys + (layer * b.m.kv_heads + g) * dp * r.room;
        const float* v = r.values + (layer * b.m.kv_heads + g) * dp * r.room;
        for (long t = 0; t < n; t++)
            for (long i = 0; i < d; i++) k[t * dp + i] = kt[i * r.room + t], vt[i * ld + t] = v[t * dp + i];
        std::fill(dk, dk + 2 * n * dp, 0.f);  // and dv
        for (long h = g * group; h < (g + 1) * group; h++) {
            const float *ph = probs + h * whole * ld, *qh = q + h * whole * dp;
            for (long t = 0; t < nq; t++)
                std::copy(d_o + t * b.Q_ + h * d, d_o + t * b.Q_ + (h + 1) * d, dout + t * dp);
            for (long t = 0; t < nq; t += ROWS) {
                const long m = std::min(ROWS, nq - t), sees = r.position(last, t + m - 1) + 1, seen = up(sees);
                gemm(dout + t * dp, dp, 1, vt, ld, ds + t * ld, ld, m, seen, d, false);
                for (long i = t; i < t + m; i++) {
                    const float along = dot(o + i * b.Q_ + h * d, dout + i * dp, d);
                    float* s = ds + i * ld;
                    for (long j = 0; j < seen; j += W)
                        store(s + j, load(ph + i * ld + j) * (load(s + j) - along) * scale);
                }
                gemm(ds + t * ld, ld, 1, k, dp, dq + t * dp, dp, m, dp, sees, false);
            }
            for (long t = 0, from = 0; t < n; t += ROWS) {  // no query before position t sees keys from t on
                const long m = std::min(ROWS, n - t);
                while (from < nq && r.position(last, from) < t) from++;
                gemm(ds + from * ld + t, 1, ld, qh + from * dp, dp, dk + t * dp, dp, m, dp, nq - from, true);
                gemm(ph + from * ld + t, 1, ld, dout + from * dp, dp, dv + t * dp, dp, m, dp, nq - from, true);
            }
            for (long t = 0; t < nq; t++)
                rotate(b, dq + t * dp, d_queries + t * b.Q_ + h * d, r.position(last, t), -1.f);
        }
        for (long t = 0; t < n; t++) {
            float* to = d_kv + t * 2 * b.KV + g * d;
            rotate(b, dk + t * dp, line, t, -1.f);
            std::copy(line, line + d, to);
            std::copy(dv + t * dp, dv + t * dp + d, to + b.KV);
        }
    }
}

// gate (M x GI) -> act (M x I): silu(g) u, or gelu(u) with tanh.
inline aligned_vec gelu_slope(aligned_vec u, aligned_vec& value) {
    const aligned_vec s = sigmoid(1.5957691216f * (u + 0.044715f * u * u * u));
    value = u * s;
    return s + u * s * (1.0f - s) * 1.5957691216f * (1.0f + 0.134145f * u * u);
}

void activate(const Body& b, const float* gate, float* act, long M) {
    for (long t = 0; t < M; t++)
        for (long i = 0; i < b.I; i += W) {
            const float* g = gate + t * b.GI + i;
            aligned_vec v;
            if (b.m.gated) v = load(g) / (1.0f + exp_of(-load(g))) * load(g + b.I);
            else gelu_slope(load(g), v);
            store(act + t * b.I + i, v);
        }
}

// d (gate) from d (act); gives act again.
void activate_back(const Body& b, const float* gate, const float* dact, float* act, float* dgate, long M) {
    for (long t = 0; t < M; t++)
        for (long i = 0; i < b.I; i += W) {
            const float* g = gate + t * b.GI + i;
            const aligned_vec d = load(dact + t * b.I + i);
            aligned_vec v;
            if (b.m.gated) {
                const aligned_vec x = load(g), u = load(g + b.I), s = sigmoid(x);
                v = x * s * u;
                store(dgate + t * b.GI + i, d * u * s * (1.0f + x * (1.0f - s)));
                store(dgate + t * b.GI + b.I + i, d * x * s);
            } else {
                store(dgate + t * b.GI + i, d * gelu_slope(load(g), v));
            }
            store(act + t * b.I + i, v);
        }
}

struct Scratch {
    std::vector<float> x, h, some, queries, kv, gate, act, dx, dy, dh, dmore, norm, work;
};

// Rows of x (., H) at a row's asked positions.
void pick(const Row& r, const float* x, float* to, long n, long H) {
    for (long t = 0; t < n; t++) std::copy(x + (r.asked[t] - r.past) * H, x + (r.asked[t] - r.past + 1) * H, to + t * H);
}

// All layers over a group. Of `kept` each layer writes its own part, or with keep = false all the same. `s.x` holds what
// the last layer gives at the asked positions.
void forward(const Body& b, const Group& g, float* kept, const Kept& k, bool keep, Scratch& s) {
    const long H = b.H, M = g.M;
    s.x.resize(M * H), s.h.resize(M * H), s.some.resize(M * H), s.queries.resize(M * b.Q_), s.kv.resize(M * 2 * b.KV);
    s.act.resize(M * b.I), s.norm.resize(2 * M);
    for (const Row& r : g.rows)
        for (long t = 0; t < r.n; t++) {
            const float* e = b.w[EMBED] + r.tokens[t] * H;
            float* x = s.x.data() + (r.first + t) * H;
            for (long i = 0; i < H; i += W) {
                aligned_vec v = load(e + i);
                if (b.w[PLACES]) v += load(b.w[PLACES] + (r.past + t) * H + i);
                store(x + i, v);
            }
        }
    for (long l = 0; l < b.m.layers; l++) {
        float* at = kept + (keep ? l * k.size : 0);
        const Layer& p = b.layers[l];
        const bool last = l + 1 == b.m.layers;
        const long m = last ? g.asked : M;
        std::copy(s.x.begin(), s.x.begin() + M * H, at + k.x);
        normalise(b, s.x.data(), b.weight(l, N1), b.weight(l, N1B), s.h.data(), s.norm.data(), M);
        p.kv.apply(s.h.data(), H, s.kv.data(), 2 * b.KV, M, false);
        add_bias(s.kv.data(), p.kv_bias.data(), M, 2 * b.KV);
        const float* asking = s.h.data();
        if (last) {
            asking = s.some.data();
            for (const Row& r : g.rows) {
                pick(r, s.h.data() + r.first * H, s.some.data() + r.first_asked * H, r.n_asked, H);
                pick(r, at + k.x + r.first * H, s.x.data() + r.first_asked * H, r.n_asked, H);
            }
        }
        p.q.apply(asking, H, s.queries.data(), b.Q_, m, false);
        add_bias(s.queries.data(), p.q_bias.data(), m, b.Q_);
        long square = 0;
        for (const Row& r : g.rows) {
            const long first = r.begin(last);
            attend(b, r, l, last, s.queries.data() + first * b.Q_, s.kv.data() + r.first * 2 * b.KV,
                   at + k.q + first * b.m.heads * b.dp, at + k.probs + square, at + k.o + first * b.Q_);
            square += r.n * up(r.past + r.n) * b.m.heads;
        }
        p.o.apply(at + k.o, b.Q_, s.x.data(), H, m, true);
        if (b.weight(l, OB)) add_bias(s.x.data(), b.weight(l, OB), m, H);
        std::copy(s.x.begin(), s.x.begin() + m * H, at + k.mid);
        normalise(b, s.x.data(), b.weight(l, N2), b.weight(l, N2B), s.h.data(), s.norm.data(), m);
        p.up_gate.apply(s.h.data(), H, at + k.gate, b.GI, m, false);
        if (b.weight(l, UB) || b.weight(l, GB)) add_bias(at + k.gate, p.gate_bias.data(), m, b.GI);
        activate(b, at + k.gate, s.act.data(), m);
        p.down.apply(s.act.data(), b.I, s.x.data(), H, m, true);
        if (b.weight(l, DB)) add_bias(s.x.data(), b.weight(l, DB), m, H);
    }
}

// From `s.dx`, the gradient of what the last layer gives at the first `asked` asked positions of a row, to the weights'
// gradients. What stands behind the last of these has no gradient and is not looked at. square: where the row's part of
// a layer's `probs` begins.
void backward(const Body& b, const Row& r, long asked, long square, const float* kept, const Kept& k,
              float* const* grad, int64_t no_gradient, Scratch& s) {
    const long H = b.H, I = b.I, n = r.asked[asked - 1] + 1;
    s.h.resize(n * H), s.some.resize(n * H), s.queries.resize(n * b.Q_), s.kv.resize(n * 2 * b.KV);
    s.act.resize(n * I), s.gate.resize(n * b.GI), s.dh.resize(n * std::max(H, b.Q_)), s.dmore.resize(n * std::max(H, I));
    s.norm.resize(2 * n), s.dx.resize(n * H);
    float* dx = s.dx.data();
    for (long l = b.m.layers - 1; l >= 0; l--) {
        const bool last = l + 1 == b.m.layers;
        const float* at = kept + l * k.size;
        const long first = r.begin(last), m = last ? asked : n;
        const float *x = at + k.x + r.first * H, *mid = at + k.mid + first * H, *o = at + k.o + first * b.Q_;
        const Layer& p = b.layers[l];
        float* const* g = grad + FIRST + l * PER_LAYER;
        p.down_back.apply(dx, H, s.dmore.data(), I, m, false);
        activate_back(b, at + k.gate + first * b.GI, s.dmore.data(), s.act.data(), s.gate.data(), m);
        gemm(dx, 1, H, s.act.data(), I, g[D], I, H, I, m, true);
        if (g[DB]) add_columns(dx, H, g[DB], m, H);
        normalise(b, mid, b.weight(l, N2), b.weight(l, N2B), s.h.data(), s.norm.data(), m);
        if (g[G]) gemm(s.gate.data(), 1, b.GI, s.h.data(), H, g[G], H, I, H, m, true);
        if (g[GB]) add_columns(s.gate.data(), b.GI, g[GB], m, I);
        gemm(s.gate.data() + b.GI - I, 1, b.GI, s.h.data(), H, g[U], H, I, H, m, true);
        if (g[UB]) add_columns(s.gate.data() + b.GI - I, b.GI, g[UB], m, I);
        p.up_gate_back.apply(s.gate.data(), b.GI, s.dh.data(), H, m, false);
        normalise_back(b, mid, b.weight(l, N2), s.dh.data(), s.norm.data(), dx, g[N2], g[N2B], m);

        p.o_back.apply(dx, H, s.dh.data(), b.Q_, m, false);
        gemm(dx, 1, H, o, b.Q_, g[O], b.Q_, H, b.Q_, m, true);
        if (g[OB]) add_columns(dx, H, g[OB], m, H);
        attend_back(b, r, n, m, l, last, at + k.q + first * b.m.heads * b.dp, at + k.probs + square, o, s.dh.data(),
                    s.queries.data(), s.kv.data(), s.work);
        normalise(b, x, b.weight(l, N1), b.weight(l, N1B), s.h.data(), s.norm.data(), n);
        const float* asking = s.h.data();
        if (last) pick(r, s.h.data(), s.some.data(), m, H), asking = s.some.data();
        gemm(s.queries.data(), 1, b.Q_, asking, H, g[Q], H, b.Q_, H, m, true);
        gemm(s.kv.data(), 1, 2 * b.KV, s.h.data(), H, g[K], H, b.KV, H, n, true);
        gemm(s.kv.data() + b.KV, 1, 2 * b.KV, s.h.data(), H, g[V], H, b.KV, H, n, true);
        if (g[QB]) add_columns(s.queries.data(), b.Q_, g[QB], m, b.Q_);
        if (g[KB]) add_columns(s.kv.data(), 2 * b.KV, g[KB], n, b.KV);
        if (g[VB]) add_columns(s.kv.data() + b.KV, 2 * b.KV, g[VB], n, b.KV);
        p.kv_back.apply(s.kv.data(), 2 * b.KV, s.dh.data(), H, n, false);
        if (last) {  // from the asked positions to all
            p.q_back.apply(s.queries.data(), b.Q_, s.dmore.data(), H, m, false);
            std::copy(dx, dx + m * H, s.some.data());
            std::fill(dx, dx + n * H, 0.f);
            for (long t = 0; t < m; t++)
                for (long i = 0, to = r.asked[t] * H; i < H; i += W) {
                    store(s.dh.data() + to + i, load(s.dh.data() + to + i) + load(s.dmore.data() + t * H + i));
                    store(dx + to + i, load(s.some.data() + t * H + i));
                }
        } else {
            p.q_back.apply(s.queries.data(), b.Q_, s.dh.data(), H, m, true);
        }
        normalise_back(b, x, b.weight(l, N1), s.dh.data(), s.norm.data(), dx, g[N1], g[N1B], n);
    }
    for (long t = 0; t < n; t++) {
        float* e = grad[EMBED] + r.tokens[t] * H;
        if (r.tokens[t] != no_gradient)
            for (long i = 0; i < H; i += W) store(e + i, load(e + i) + load(dx + t * H + i));
        if (float* place = grad[PLACES])
            for (long i = 0; i < H; i += W) store(place + t * H + i, load(place + t * H + i) + load(dx + t * H + i));
    }
}

constexpr long GROUP = 128;  // tokens of a group, unless one row has more

// Calls with (first row, one past the last row) of each group.
template <class Call>
void groups(const int64_t* lengths, long n_rows, Call call) {
    for (long begin = 0; begin < n_rows;) {
        long end = begin + 1, total = lengths[begin];
        while (end < n_rows && total + lengths[end] <= GROUP) total += lengths[end++];
        call(begin, end);
        begin = end;
    }
}

long cache_size(const Body& b, long room) { return b.m.layers * b.m.kv_heads * b.dp * room; }

// A minibatch as `states` gets it: walks through its groups and through `kept`, of which each group has a part: caches,
// then what each layer keeps, then what the last layer gives and its norms.
struct Batch {
    const Body& b;
    const int64_t *tokens, *lengths, *chosen, *counts;
    long stride, n_rows;

    template <class Call>
    void walk(Call call) const {
        const int64_t* asked = chosen;
        groups(lengths, n_rows, [&](long begin, long end) {
            Group g;
            for (long i = begin; i < end; i++) {
                g.add({tokens + i * stride, asked, lengths[i], counts[i], 0, up(lengths[i])});
                asked += counts[i];
            }
            call(g, Kept(b, g.M, Kept::squares(g)));
        });
    }
    long cached(const Group& g) const {
        long total = 0;
        for (const Row& r : g.rows) total += 2 * cache_size(b, r.room);
        return total;
    }
    long size(const Group& g, const Kept& k) const { return cached(g) + b.m.layers * k.size + g.M * (b.H + 2); }
    void place(Group& g, float* cache) const {
        for (Row& r : g.rows) {
            const long size = cache_size(b, r.room);
            r.keys = cache, r.values = cache + size, cache += 2 * size;
        }
    }
};

struct Decoder {
    Body body;
    Scratch scratch;
    std::vector<float> kept;
};

}  // namespace

extern "C" {

// Floats of the buffer that `states` fills for `states_back`.
int64_t kept_size(const Model* model, const float* const* weights, const int64_t* lengths, const int64_t* counts,
                  int64_t n_rows) {
    Model shape = *model;
    shape.layers = 0;
    Body b(shape, weights, false);
    b.m.layers = model->layers;
    const Batch batch{b, nullptr, lengths, nullptr, counts, 0, n_rows};
    long total = 0;
    batch.walk([&](Group& g, const Kept& k) { total += batch.size(g, k); });
    return total;
}

// Normed hidden states (., hidden) at the chosen positions of rows (n_rows, stride) of token ids.
// chosen: ascending columns, row after row; counts (n_rows): how many of them each row has.
void states(const Model* model, const float* const* weights, const int64_t* tokens, int64_t stride,
            const int64_t* lengths, int64_t n_rows, const int64_t* chosen, const int64_t* counts, float* kept,
            float* out) {
    const Body b(*model, weights, false);
    const Batch batch{b, tokens, lengths, chosen, counts, stride, n_rows};
    Scratch s;
    std::vector<float> own;
    batch.walk([&](Group& g, const Kept& k) {
        if (!kept) own.resize(batch.size(g, k));
        float* at = kept ? kept : own.data();
        float *layers = at + batch.cached(g), *last = layers + b.m.layers * k.size;
        batch.place(g, at);
        forward(b, g, layers, k, kept != nullptr, s);
        std::copy(s.x.begin(), s.x.begin() + g.asked * b.H, last);
        normalise(b, last, b.w[NORM], b.w[NORM_BIAS], out, last + g.M * b.H, g.asked);
        out += g.asked * b.H;
        if (kept) kept += batch.size(g, k);
    });
}

// Adds to `grad` (as `weights`, null where there is no weight) the gradients from that of what `states` gave.
void states_back(const Model* model, const float* const* weights, const int64_t* tokens, int64_t stride,
                 const int64_t* lengths, int64_t n_rows, const int64_t* chosen, const int64_t* counts, float* kept,
                 const float* seed, float* const* grad, int64_t no_gradient) {
    const Body b(*model, weights, true);
    const Batch batch{b, tokens, lengths, chosen, counts, stride, n_rows};
    Scratch s;
    batch.walk([&](Group& g, const Kept& k) {
        const float *layers = kept + batch.cached(g), *last = layers + b.m.layers * k.size;
        batch.place(g, kept);
        long square = 0;
        for (const Row& r : g.rows) {
            long asked = 0;  // up to the last one with a gradient
            for (long t = 0; t < r.n_asked; t++) {
                bool any = false;
                for (long i = 0; i < b.H; i++) any |= seed[t * b.H + i] != 0.f;
                if (any) asked = t + 1;
            }
            if (asked) {
                s.dx.assign(r.n * b.H, 0.f);
                normalise_back(b, last + r.first_asked * b.H, b.w[NORM], seed, last + g.M * b.H + 2 * r.first_asked,
                               s.dx.data(), grad[NORM], grad[NORM_BIAS], asked);
                backward(b, r, asked, square, layers, k, grad, no_gradient, s);
            }
            square += r.n * up(r.n) * b.m.heads, seed += r.n_asked * b.H;
        }
        kept += batch.size(g, k);
    });
}

// Logits are states (N, H) times weight (V, H), over the temperature. Gives log-softmax (N, V), and of it the log-prob of
// each id, entropy and sum of squared probabilities (N).
void scores(const float* states, const float* weight, const int64_t* ids, int64_t N, int64_t V, int64_t H,
            double temperature, float* log_softmax, float* chosen, float* entropy, float* squares) {
    Packed p;
    p.reserve(H, V);
    pack_forward(p, 0, weight, V, H);
    const long ld = up(V), some = 48;
    std::vector<float> logits(some * ld);
    const float by = static_cast<float>(temperature);
    for (long from = 0; from < N; from += some) {
        const long m = std::min<long>(some, N - from);
        p.apply(states + from * H, H, logits.data(), ld, m, false);
        for (long t = 0; t < m; t++) {
            float* z = logits.data() + t * ld;
            std::fill(z + V, z + ld, -INFINITY);
            aligned_vec tops = splat(-INFINITY), total{}, square{}, plogp{};
            for (long i = 0; i < ld; i += W) {
                const aligned_vec x = load(z + i) / by;
                store(z + i, x);
                tops = x > tops ? x : tops;
            }
            float top = tops[0];
            for (long i = 1; i < W; i++) top = tops[i] > top ? tops[i] : top;
            for (long i = 0; i < ld; i += W) total += exp_of(load(z + i) - top);
            const float shift = top + std::log(sum(total));
            for (long i = 0; i < ld; i += W) {
                const aligned_vec l = load(z + i) - shift, e = exp_of(l);
                store(z + i, l);
                square += e * e;
                plogp += lane + int(i) < int(V) ? e * l : aligned_vec{};
            }
            std::copy(z, z + V, log_softmax + (from + t) * V);
            chosen[from + t] = z[ids[from + t]], entropy[from + t] = -sum(plogp), squares[from + t] = sum(square);
        }
    }
}

// The gradients of states (N, H) and, added, of weight (V, H) from those of the ids' log-probs and the entropies (N).
void scores_back(const float* states, const float* weight, const int64_t* ids, int64_t N, int64_t V, int64_t H,
                 double temperature, const float* log_softmax, const float* entropy, const float* d_chosen,
                 const float* d_entropy, float* d_states, float* d_weight) {
    Packed p;
    p.reserve(V, H);
    pack_backward(p, 0, weight, V, H);
    const long ld = up(V), some = 48;
    std::vector<float> dz(some * ld);
    const float by = 1.0f / static_cast<float>(temperature);
    for (long from = 0; from < N; from += some) {
        const long m = std::min<long>(some, N - from);
        for (long t = 0; t < m; t++) {
            const float *l = log_softmax + (from + t) * V, dc = d_chosen[from + t];
            const float de = d_entropy ? d_entropy[from + t] : 0.f, mean = entropy[from + t];
            float* z = dz.data() + t * ld;
            std::copy(l, l + V, z);
            for (long i = 0; i < ld; i += W) {
                const aligned_vec e = exp_of(load(z + i));
                store(z + i, (d_entropy ? -e * (dc + de * (load(z + i) + mean)) : -e * dc) * by);
            }
            z[ids[from + t]] += dc * by;
        }
        p.apply(dz.data(), ld, d_states + from * H, H, m, false);
        gemm(dz.data(), 1, ld, states + from * H, H, d_weight, H, V, H, m, true);
    }
}

// What decoding step after step reads, packed once. The weights must not change while it lives.
void* decoder(const Model* model, const float* const* weights) { return new Decoder{Body(*model, weights, false), {}, {}}; }
void end_decoder(void* made) { delete static_cast<Decoder*>(made); }

// Appends n[i] tokens to each slot's cache and gives the normed state (hidden) of its last one; slots with n = 0 are left
// alone. Slot i has past[i] tokens in its cache, with room for `room` (a multiple of 16).
void extend(void* made, const int64_t* tokens, int64_t stride, const int64_t* n, const int64_t* past,
            float* const* caches, int64_t room, int64_t n_slots, float* out) {
    Decoder& d = *static_cast<Decoder*>(made);
    const Body& b = d.body;
    std::vector<int64_t> ends(n_slots);
    groups(n, n_slots, [&](long begin, long end) {
        Group g;
        for (long i = begin; i < end; i++) {
            if (!n[i]) continue;
            ends[i] = past[i] + n[i] - 1;
            Row r{tokens + i * stride, &ends[i], n[i], 1, past[i], room};
            r.keys = caches[i], r.values = caches[i] + cache_size(b, room);
            g.add(r);
        }
        if (!g.M) return;
        const Kept k(b, g.M, Kept::squares(g));
        if (d.kept.size() < static_cast<size_t>(k.size)) d.kept.resize(k.size);
        float norm[2];
        forward(b, g, d.kept.data(), k, false, d.scratch);
        const float* x = d.scratch.x.data();
        for (long i = begin; i < end; i++)
            if (n[i]) normalise(b, x, b.w[NORM], b.w[NORM_BIAS], out + i * b.H, norm, 1), x += b.H;
    });
}
}

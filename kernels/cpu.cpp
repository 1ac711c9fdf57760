// What torch does slowly with few rows; see cpu.py.
//
// Rows times a matrix that half precision holds, summed in float32: a processor's own prefetching serves one stream a thread
// best, so the matrix lies in the order in which it is read, four outputs side by side, eight inputs of each at a time. A sum
// runs over the same terms in the same order however many rows there are, so what a row gives does not depend on the rows
// beside it.

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <immintrin.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>
#include <optional>

namespace {

constexpr int64_t TILE = 4, LANES = 8;
constexpr int64_t CHUNK = 96;        // rows that stay in the second cache while the matrix passes by
constexpr int64_t AHEAD = 1024;      // weights; how far ahead memory is asked where it is all that is waited for
constexpr int64_t LEAST = 64 << 10;  // weights that are worth a thread

struct Matrix {
  const at::Half* weight;  // [tiles, in / LANES, TILE, LANES]
  const float* bias;       // [tiles * TILE], or null
  int64_t in, out;         // `out` as asked for, the last tile may be longer
};

// The sums of four vectors.
inline __m128 sums(__m256 a, __m256 b, __m256 c, __m256 d) {
  const __m256 all = _mm256_hadd_ps(_mm256_hadd_ps(a, b), _mm256_hadd_ps(c, d));
  return _mm_add_ps(_mm256_castps256_ps128(all), _mm256_extractf128_ps(all, 1));
}

// ROWS rows of x with four outputs.
template <int ROWS>
inline void tile(const Matrix& m, const float* x, float* y, int64_t number, int64_t ahead) {
  const at::Half* w = m.weight + number * TILE * m.in;
  __m256 sum[ROWS][TILE];
  for (auto& row : sum)
    for (auto& each : row) each = _mm256_setzero_ps();
  for (int64_t k = 0; k < m.in; k += LANES, w += TILE * LANES) {
    _mm_prefetch(reinterpret_cast<const char*>(w + ahead), _MM_HINT_T0);
    __m256 some[ROWS];
    for (int r = 0; r < ROWS; r++) some[r] = _mm256_loadu_ps(x + r * m.in + k);
    for (int o = 0; o < TILE; o++) {
      const __m256 part = _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(w + o * LANES)));
      for (int r = 0; r < ROWS; r++) sum[r][o] = _mm256_fmadd_ps(part, some[r], sum[r][o]);
    }
  }
  const int64_t first = number * TILE, count = std::min(TILE, m.out - first);
#pragma GCC unroll 3  // a sum that is looked up by number would lie in memory
  for (int r = 0; r < ROWS; r++) {
    __m128 total = sums(sum[r][0], sum[r][1], sum[r][2], sum[r][3]);
    if (m.bias) total = _mm_add_ps(total, _mm_loadu_ps(m.bias + first));
    float* to = y + r * m.out + first;
    if (count == TILE) {
      _mm_storeu_ps(to, total);
    } else {
      alignas(16) float four[TILE];
      _mm_store_ps(four, total);
      std::copy(four, four + count, to);
    }
  }
}

// Tiles begin .. end for all rows: three at a time, since twelve sums, three inputs and a weight fill the registers.
void share(const Matrix& m, const float* x, float* y, int64_t rows, int64_t begin, int64_t end) {
  for (int64_t from = 0; from < rows; from += CHUNK) {
    const int64_t until = std::min(rows, from + CHUNK);
    for (int64_t number = begin; number < end; number++) {
      for (int64_t row = from, some; row < until; row += some) {
        const int64_t left = until - row;
        some = left == 1 ? 1 : left == 2 || left == 4 ? 2 : 3;
        // The first rows bring a tile from memory; while the last ones compute with it, the next one comes.
        const int64_t ahead = row > from && left == some ? TILE * m.in : AHEAD;
        const float* own = x + row * m.in;
        float* result = y + row * m.out;
        if (some == 1) tile<1>(m, own, result, number, ahead);
        if (some == 2) tile<2>(m, own, result, number, ahead);
        if (some == 3) tile<3>(m, own, result, number, ahead);
      }
    }
  }
}

void no_gradient(const at::Tensor& x) {
  TORCH_CHECK(!(at::GradMode::is_enabled() && x.requires_grad()), "this kernel has no gradient: use torch.no_grad()");
}

at::Tensor half_linear(const at::Tensor& x, const at::Tensor& weight, const std::optional<at::Tensor>& bias, int64_t out) {
  TORCH_CHECK(weight.dim() == 4 && weight.scalar_type() == at::kHalf && weight.is_contiguous() && weight.numel() > 0 &&
                  weight.size(2) == TILE && weight.size(3) == LANES,
              "weight: see cpu.pack");
  const int64_t in = weight.size(1) * LANES, missing = in - x.size(-1);
  TORCH_CHECK(x.scalar_type() == at::kFloat && missing >= 0 && missing < LANES, "x: float32, of the matrix's width");
  TORCH_CHECK(weight.size(0) == (out + TILE - 1) / TILE, "out: not the matrix's");
  TORCH_CHECK(!bias || (bias->scalar_type() == at::kFloat && bias->is_contiguous() &&
                        bias->numel() == weight.size(0) * TILE),
              "bias: see cpu.pack");
  no_gradient(x);
  const at::Tensor rows = (missing ? at::constant_pad_nd(x, {0, missing}) : x).contiguous();
  auto shape = x.sizes().vec();
  shape.back() = out;
  at::Tensor result = at::empty(shape, x.options());
  const Matrix m{weight.data_ptr<at::Half>(), bias ? bias->data_ptr<float>() : nullptr, in, out};
  const float* from = rows.data_ptr<float>();
  float* to = result.data_ptr<float>();
  const int64_t count = rows.numel() / in;
  at::parallel_for(0, weight.size(0), std::max<int64_t>(1, LEAST / (TILE * in)), [&](int64_t begin, int64_t end) {
    share(m, from, to, count, begin, end);
  });
  return result;
}

// x / sqrt(mean(x^2) + eps) over the last dimension, times `weight`: in one operator, where torch takes seven.
at::Tensor rms_norm(const at::Tensor& x, const at::Tensor& weight, double eps) {
  const int64_t width = x.size(-1);
  TORCH_CHECK(x.scalar_type() == at::kFloat && weight.scalar_type() == at::kFloat && weight.numel() == width && width > 0,
              "rms_norm: x [..., H] and weight [H], both float32");
  no_gradient(x);
  const at::Tensor rows = x.contiguous(), scale = weight.contiguous();
  at::Tensor result = at::empty_like(rows);
  const float *from = rows.data_ptr<float>(), *by = scale.data_ptr<float>();
  float* to = result.data_ptr<float>();
  for (int64_t row = 0; row < rows.numel() / width; row++, from += width, to += width) {
    __m256 lanes = _mm256_setzero_ps();
    int64_t k = 0;
    for (; k + LANES <= width; k += LANES) {
      const __m256 some = _mm256_loadu_ps(from + k);
      lanes = _mm256_fmadd_ps(some, some, lanes);
    }
    const __m256 none = _mm256_setzero_ps();
    float total = _mm_cvtss_f32(sums(lanes, none, none, none));
    for (; k < width; k++) total += from[k] * from[k];
    const float factor = 1 / std::sqrt(total / static_cast<float>(width) + static_cast<float>(eps));
    for (k = 0; k < width; k++) to[k] = by[k] * (from[k] * factor);
  }
  return result;
}

}  // namespace

TORCH_LIBRARY(specresearch, library) {
  library.def("rms_norm(Tensor x, Tensor weight, float eps) -> Tensor", rms_norm);
  library.def("half_linear(Tensor x, Tensor weight, Tensor? bias, int out) -> Tensor", half_linear);
}

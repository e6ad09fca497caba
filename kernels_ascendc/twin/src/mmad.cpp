// The cube's inner product: float accumulation over k in order, product and sum rounded separately.
#include <stddef.h>

namespace twin {
namespace TWIN_LEVEL {
namespace {

typedef float Vec __attribute__((vector_size(64), aligned(4)));

#if defined(__AVX512F__)
constexpr int kRows = 12;
#elif defined(__AVX2__)
constexpr int kRows = 6;
#else
constexpr int kRows = 3;
#endif

template <int Rows> void panel(float* c, const float* a, const float* b, int k) {
  Vec sum[Rows];
  for (int r = 0; r < Rows; ++r) sum[r] = *reinterpret_cast<Vec*>(c + r * 16);
  for (int i = 0; i < k; ++i) {
    const Vec row = *reinterpret_cast<const Vec*>(b + (size_t)i * 16);
    for (int r = 0; r < Rows; ++r) sum[r] = sum[r] + row * a[(size_t)r * k + i];
  }
  for (int r = 0; r < Rows; ++r) *reinterpret_cast<Vec*>(c + r * 16) = sum[r];
}

template <int Rows> void rest(float* c, const float* a, const float* b, int rows, int k) {
  if constexpr (Rows > 0) {
    if (rows == Rows) panel<Rows>(c, a, b, k);
    else rest<Rows - 1>(c, a, b, rows, k);
  }
}

}  // namespace

// c [n / 16][m][16] += a [m][k] times b [n / 16][k][16].
void multiply(float* c, const float* a, const float* b, int m, int n, int k) {
  for (int j = 0; j < n / 16; ++j) {
    float* out = c + (size_t)j * m * 16;
    const float* columns = b + (size_t)j * k * 16;
    int i = 0;
    for (; i + kRows <= m; i += kRows) panel<kRows>(out + (size_t)i * 16, a + (size_t)i * k, columns, k);
    rest<kRows - 1>(out + (size_t)i * 16, a + (size_t)i * k, columns, m - i, k);
  }
}

}  // namespace TWIN_LEVEL
}  // namespace twin

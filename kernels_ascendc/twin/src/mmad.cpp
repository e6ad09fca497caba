// The cube's inner product: float accumulation over k in order, product and sum rounded separately.
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

// A's rows lie in lines of k0 values, `line_rows` rows to a line: the layout of L0A, widened to float.
struct Left {
  const float* data;
  long line_rows;
  int k0;
};

template <int Rows> void panel(float* c, const Left& a, int first, const float* b, int k) {
  Vec sum[Rows];
  for (int r = 0; r < Rows; ++r) sum[r] = *reinterpret_cast<Vec*>(c + r * 16);
  const float* line = a.data + (long)first * a.k0;
  for (int done = 0; done < k; done += a.k0, line += a.line_rows * a.k0) {
    const int n = k - done < a.k0 ? k - done : a.k0;
    for (int i = 0; i < n; ++i, b += 16) {
      const Vec row = *reinterpret_cast<const Vec*>(b);
      for (int r = 0; r < Rows; ++r) sum[r] = sum[r] + row * line[(long)r * a.k0 + i];
    }
  }
  for (int r = 0; r < Rows; ++r) *reinterpret_cast<Vec*>(c + r * 16) = sum[r];
}

template <int Rows> void rest(float* c, const Left& a, int first, const float* b, int rows, int k) {
  if constexpr (Rows > 0) {
    if (rows == Rows) panel<Rows>(c, a, first, b, k);
    else rest<Rows - 1>(c, a, first, b, rows, k);
  }
}

}  // namespace

// c [m][16] += A [m, k] times b [k][16].
void multiply(float* c, const float* a, long line_rows, int k0, const float* b, int m, int k) {
  const Left left{a, line_rows, k0};
  int i = 0;
  for (; i + kRows <= m; i += kRows) panel<kRows>(c + (long)i * 16, left, i, b, k);
  rest<kRows - 1>(c + (long)i * 16, left, i, b, m - i, k);
}

// b [k][16] of 16 columns that lie in lines of k0 values, 16 of them every `line_rows`: Zn, widened to float.
void transpose_panel(float* b, const float* columns, long line_rows, int k0, int k) {
  for (int done = 0; done < k; done += k0, columns += line_rows * k0) {
    const int n = k - done < k0 ? k - done : k0;
    for (int i = 0; i < n; ++i, b += 16)
      for (int j = 0; j < 16; ++j) b[j] = columns[j * k0 + i];
  }
}

}  // namespace TWIN_LEVEL
}  // namespace twin

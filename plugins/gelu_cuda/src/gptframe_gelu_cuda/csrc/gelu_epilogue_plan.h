// Row-major torch matrices as the column-major ones of cuBLASLt. Plain arithmetic, so that tests run it on the host.
#pragma once

namespace gelu {

struct Matrix {
  long long rows, columns, leading;  // column-major, as stored
};
struct Plan {
  int backward, transpose_a;
  Matrix a, b, d;
};

// A row-major [r, c] is the column-major [c, r] with leading dimension c, so y^T is computed:
// y[rows, hidden] = x[rows, width] weight[hidden, width]^T
inline Plan forward_plan(long long rows, long long hidden, long long width) {
  return {0, 1, {width, hidden, width}, {width, rows, width}, {hidden, rows, hidden}};
}
// dh[rows, hidden] = grad[rows, width] weight[width, hidden]
inline Plan backward_plan(long long rows, long long hidden, long long width) {
  return {1, 0, {hidden, width, hidden}, {width, rows, width}, {hidden, rows, hidden}};
}

}  // namespace gelu

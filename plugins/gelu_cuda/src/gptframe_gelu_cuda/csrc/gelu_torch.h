// What the CPU and the CUDA operators have in common: argument checks and memory layout, on torch's stable ABI.
#pragma once

#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/Exception.h>

#include <tuple>

namespace gelu {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

inline bool same_layout(const Tensor& a, const Tensor& b) {
  const auto size_a = a.sizes(), size_b = b.sizes(), stride_a = a.strides(), stride_b = b.strides();
  if (size_a.size() != size_b.size()) return false;
  for (size_t i = 0; i < size_a.size(); ++i)
    if (size_a[i] != size_b[i] || (size_a[i] > 1 && stride_a[i] != stride_b[i])) return false;
  return true;
}

// `t` itself where it lies in memory as `like` does (`like` comes from empty_like: dense, each element once),
// else a copy that does. All pointers can then be walked in storage order.
inline Tensor laid_out_as(const Tensor& t, const Tensor& like) {
  if (same_layout(t, like)) return t;
  Tensor copy = torch::stable::empty_like(like);
  torch::stable::copy_(copy, t);
  return copy;
}

inline void check_float(const Tensor& x) {
  switch (x.scalar_type()) {
    case ScalarType::Float:
    case ScalarType::Double:
    case ScalarType::Half:
    case ScalarType::BFloat16:
      return;
    default:
      STD_TORCH_CHECK(false, "gelu needs float64, float32, float16 or bfloat16");
  }
}

inline void check_same(const Tensor& a, const Tensor& x, const char* what) {
  STD_TORCH_CHECK(a.scalar_type() == x.scalar_type(), "gelu: ", what, " and x have different dtypes");
  STD_TORCH_CHECK(a.get_device_index() == x.get_device_index() && a.is_cpu() == x.is_cpu(), "gelu: ", what,
                  " and x are on different devices");
  const auto size_a = a.sizes(), size_x = x.sizes();
  bool same = size_a.size() == size_x.size();
  for (size_t i = 0; same && i < size_a.size(); ++i) same = size_a[i] == size_x[i];
  STD_TORCH_CHECK(same, "gelu: ", what, " and x have different shapes");
}

// The bias has x's dtype, or float32 beside a half x (the parameters under autocast).
inline void check_bias(const Tensor& x, const Tensor& bias) {
  const ScalarType type = x.scalar_type();
  STD_TORCH_CHECK(x.dim() >= 1, "bias_gelu: x needs at least one dimension");
  STD_TORCH_CHECK(bias.dim() == 1 && bias.size(0) == x.size(x.dim() - 1), "bias_gelu: the bias must have shape [",
                  x.size(x.dim() - 1), "], the last dimension of x");
  const bool half = type == ScalarType::Half || type == ScalarType::BFloat16;
  STD_TORCH_CHECK(bias.scalar_type() == type || (half && bias.scalar_type() == ScalarType::Float),
                  "bias_gelu: the bias must have the dtype of x (or float32 beside a 16-bit x)");
  STD_TORCH_CHECK(bias.get_device_index() == x.get_device_index() && bias.is_cpu() == x.is_cpu(),
                  "bias_gelu: bias and x are on different devices");
}

inline Tensor contiguous(const Tensor& t) {
  return t.is_contiguous() ? t : torch::stable::contiguous(t);
}

}  // namespace gelu

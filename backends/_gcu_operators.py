"""Which operators of torch run on the CPU on GCU cards of the current generation, tensor by tensor.

Two lists of the vendor's plug-in for torch 2.10 (docs/hardware.md): what it sends to the CPU although there is a
kernel, by model of card; and what it registers no kernel for, on any. Of the second, what a training or prediction can
meet stands below: not quantised, sparse and nested tensors, and special functions. Operators that torch composes of
others are in neither; those may have kernels.
"""

from __future__ import annotations

import re
from typing import Iterable, Mapping

from exp.errors import ConfigError

__all__ = ["FLOAT32_ATTENTION", "counted", "lacking"]


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


_SENT_BY_S60 = _names(
    """
    _fused_adamw_ _grouped_mm _log_softmax_backward_data _softmax_backward_data _upsample_bicubic2d_aa
    _upsample_nearest_exact1d _upsample_nearest_exact3d bincount convolution_backward embedding_dense_backward
    gelu_backward log_sigmoid_forward native_layer_norm_backward nll_loss_backward replication_pad1d
    sigmoid_backward silu_backward tanh_backward
    """
)
_SENT_BY_L600 = _names(
    """
    max_pool3d_with_indices scatter_reduce sinc sinh unique_consecutive
    """
)
_SENT = {3: _SENT_BY_S60, 4: _SENT_BY_L600}  # by the major version of the architecture: 3 is S60, 4 are L300 and L600

_WITHOUT_KERNEL = _names(
    """
    __ilshift__ __irshift__ _adaptive_avg_pool2d _adaptive_avg_pool2d_backward _adaptive_avg_pool3d
    _adaptive_avg_pool3d_backward _addmm_activation _aminmax _batch_norm_with_update _cdist_backward _cdist_forward
    _cholesky_solve_helper _compute_linear_combination _ctc_loss _ctc_loss_backward _cummin_helper _dirichlet_grad
    _embedding_bag _embedding_bag_backward _embedding_bag_dense_backward _embedding_bag_forward_only
    _embedding_bag_per_sample_weights_backward _fused_adagrad_ _fused_adam_ _fused_moving_avg_obs_fq_helper _fused_sgd_
    _linalg_det _linalg_eigh _linalg_eigvals _linalg_slogdet _linalg_svd _logcumsumexp _masked_softmax
    _masked_softmax_backward _pdist_backward _pdist_forward _prelu_kernel_backward _sample_dirichlet
    _segment_reduce_backward _slow_conv2d_backward _slow_conv2d_forward _standard_gamma _standard_gamma_grad
    _upsample_bicubic2d_aa_backward _upsample_bilinear2d_aa_backward _upsample_lanczos2d_aa
    _upsample_lanczos2d_aa_backward _upsample_nearest_exact1d_backward _upsample_nearest_exact2d_backward
    _upsample_nearest_exact3d_backward _weight_norm_interface_backward adaptive_avg_pool3d adaptive_avg_pool3d_backward
    adaptive_max_pool2d adaptive_max_pool2d_backward adaptive_max_pool3d adaptive_max_pool3d_backward addbmm
    avg_pool2d_backward avg_pool3d_backward batch_norm_backward batch_norm_update_stats binary_cross_entropy_backward
    cauchy_ cholesky_inverse complex conj_physical dot embedding_renorm_ fractional_max_pool2d
    fractional_max_pool2d_backward fractional_max_pool3d fractional_max_pool3d_backward geometric_ geqrf glu_backward
    glu_backward_jvp grid_sampler_2d_backward grid_sampler_3d_backward hardshrink_backward hardsigmoid_backward
    hardswish_backward hardtanh_backward hash_tensor heaviside histogram huber_loss_backward index_copy
    leaky_relu_backward linalg_cholesky_ex linalg_eig linalg_eigvals linalg_householder_product linalg_inv_ex
    linalg_ldl_factor_ex linalg_ldl_solve linalg_lstsq linalg_lu linalg_matrix_exp linalg_matrix_sqrth linalg_polar
    linalg_solve_triangular log_normal_ log_sigmoid_backward logit_backward lu_unpack max_pool2d_with_indices_backward
    max_pool3d_with_indices_backward max_unpool2d max_unpool3d multi_margin_loss_backward
    multilabel_margin_loss_backward multilabel_margin_loss_forward mvlgamma narrow_copy native_batch_norm_backward
    native_group_norm_backward nextafter nll_loss2d_backward nonzero_static norm ormqr polygamma put_
    reflection_pad1d_backward reflection_pad2d_backward reflection_pad3d_backward renorm replication_pad1d_backward
    replication_pad2d_backward replication_pad3d_backward rrelu_with_noise searchsorted segment_reduce sgn signbit
    slow_conv3d_forward slow_conv_dilated2d slow_conv_dilated3d slow_conv_transpose2d slow_conv_transpose3d
    smooth_l1_loss_backward softplus_backward softshrink softshrink_backward take tan threshold_backward
    triangular_solve tril_indices triu_indices trunc unfold_backward unique_dim unique_dim_consecutive
    upsample_bicubic2d_backward upsample_bilinear2d_backward upsample_linear1d_backward upsample_nearest1d
    upsample_nearest1d_backward upsample_nearest2d_backward upsample_nearest3d_backward upsample_trilinear3d_backward
    vdot
    """
)

FLOAT32_ATTENTION = (3,)
"""Majors whose fused attention takes float32; that of L600 ends the process."""

_USE = re.compile(r"^Op name: (?:aten::)?(\w+)(?:\.\w+)?\s+Use count: (\d+)", re.MULTILINE)


def lacking(major: int, native: Iterable[str] = ()) -> frozenset[str]:
    """Names of the operators that a card runs on the CPU.

    Args:
        major: of its architecture; what either of the known ones lacks for another.
        native: what the installed plug-in has kernels for all the same, or is to run in its own way.

    Raises:
        ConfigError: there is a name in ``native`` that no card lacks.
    """
    either = _SENT_BY_S60 | _SENT_BY_L600
    unknown = sorted(set(native) - _WITHOUT_KERNEL - either)
    if unknown:
        raise ConfigError(
            f"backend.options.native has {', '.join(unknown)}, which no GCU lacks; write a list of ATen names "
            "without an overload, such as [gelu_backward]"
        )
    return (_WITHOUT_KERNEL | _SENT.get(major, either)) - frozenset(native)


def counted(statistics: str, names: frozenset[str]) -> Mapping[str, tuple[int, int]] | None:
    """Calls of some operators in the vendor's text of statistics, which has no bytes.

    Args:
        statistics: what ``torch.gcu.debug.get_op_statistics_info`` gives.
        names: which operators.

    Returns:
        Calls and 0, by name; None where the text counts no operator at all, in words that are known.
    """
    uses = _USE.findall(statistics)
    if not uses:
        return None
    found: dict[str, tuple[int, int]] = {}
    for name, calls in uses:
        if name in names:
            found[name] = (found.get(name, (0, 0))[0] + int(calls), 0)
    return found

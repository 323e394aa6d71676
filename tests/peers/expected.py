"""The expected outcomes of torch's tests that do not pass, with the reasons."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Refused:
    """Tests that end with an error line about a missing feature."""

    pattern: str  # a regular expression for the error line
    tests: tuple[str, ...]


@dataclass(frozen=True)
class NotApplicable:
    """Tests of DDP's internals: its private attributes, its log, and its error messages."""

    at: str  # the statement at which the test fails
    why: str
    tests: tuple[str, ...]


Entry = Refused | NotApplicable

# One rank waits a minute for another in vain. torch does not run this test either.
NEVER_RUN = ("test_ddp_has_finalized",)

_DDP: tuple[Entry, ...] = (
    Refused(
        "SyncBatchNorm layers only work with GPU modules",
        (
            "test_DistributedDataParallel_SyncBatchNorm_Channels_Last",
            "test_DistributedDataParallel_SyncBatchNorm",
            "test_DistributedDataParallel_SyncBatchNorm_No_Affine",
            "test_DistributedDataParallel_SyncBatchNorm_2D_Input",
            "test_DistributedDataParallel_SyncBatchNorm_Single_Input_Per_Process",
            "test_DistributedDataParallel_SyncBatchNorm_Diff_Input_Sizes_Running_Value",
            "test_DistributedDataParallel_SyncBatchNorm_Diff_Input_Sizes_gradient",
            "test_DistributedDataParallel_SyncBatchNorm_half",
            "test_ddp_uneven_inputs_stop_iteration_sync_bn",
            "test_ddp_inference",
            "test_ddp_sync_bn_training_vs_eval",
            "test_sync_bn_logged",
        ),
    ),
    Refused(
        "cpu backend doesn't support events",
        (
            "test_ddp_native_mixed_precision_no_grad_as_bucket_view_no_set_grad_none",
            "test_ddp_native_mixed_precision_grad_as_bucket_view_no_set_grad_none",
            "test_ddp_native_mixed_precision_grad_as_bucket_view_set_grad_to_none",
            "test_ddp_native_mixed_precision_no_grad_as_bucket_view_set_grad_to_none",
        ),
    ),
    Refused(
        "Cannot access accelerator device when none is available",
        (
            "test_ddp_apply_optim_in_backward",
            "test_ddp_apply_optim_in_backward_grad_as_bucket_view_false",
            "test_ddp_apply_optim_in_backward_ignored_params",
        ),
    ),
    Refused(
        "torch.cuda.Stream requires CUDA support",
        ("test_DistributedDataParallel_non_default_stream",),
    ),
    Refused(
        "Default group size only takes effect when CUDA is available",
        ("test_ddp_hook_parity_post_localSGD",),
    ),
    Refused("Weights only load failed", ("test_ddp_hook_pickling_powerSGD",)),
    NotApplicable(
        'self.assertEqual(dist.get_backend(), "nccl")',
        "a test of NCCL",
        ("test_ddp_profiling_execution_trace",),
    ),
    NotApplicable(
        "self.assertEqual(x[0].device.index, self.rank)",
        "expects DDP to move the inputs to a GPU",
        ("test_ddp_device",),
    ),
    NotApplicable(
        'self.assertEqual(ddp_logging_data.get("device_ids"), str(rank))',
        "reads the GPU's number from DDP's log",
        ("test_ddp_logging_data_gpu",),
    ),
)

_LOGGED_TIMES = NotApplicable(
    'ddp_logging_data.get("forward_compute_time"), 1',
    "reads the reducer's times from DDP's log",
    ("test_ddp_logging_data_cpu",),
)

_OF_TORCHS_REDUCER: tuple[Entry, ...] = (
    Refused(
        "register_comm_hook requires exchange='allreduce'",
        (
            "test_ddp_comm_hook_logging",
            "test_ddp_hook_parity_allreduce",
            "test_ddp_hook_parity_allreduce_process_group",
            "test_ddp_hook_parity_powerSGD",
            "test_accumulate_gradients_no_sync_allreduce_hook",
            "test_accumulate_gradients_no_sync_allreduce_with_then_hook",
            "test_ddp_python_error_logged",
            "test_ddp_uneven_inputs",
        ),
    ),
    Refused(
        "mixed_precision requires exchange='allreduce'",
        ("test_ddp_native_mixed_precision_ignored_params",),
    ),
    _LOGGED_TIMES,
    NotApplicable(
        'self.assertTrue(s in msg, f"Expected {s} to be in {msg}")',
        "expects DDP's advice to set TORCH_DISTRIBUTED_DEBUG; our error names the parameters",
        ("test_ddp_unused_params_rebuild_buckets_exception",),
    ),
    NotApplicable(
        'static_model._get_ddp_logging_data().get("has_rebuilt_buckets", 0)',
        "reads from DDP's log whether buckets were rebuilt",
        ("test_different_graph_across_ranks",),
    ),
    NotApplicable(
        "local_used_map = model.reducer._get_local_used_map()",
        "reads a private table of torch's reducer",
        (
            "test_ddp_control_flow_same_across_ranks",
            "test_ddp_control_flow_different_across_ranks",
        ),
    ),
    NotApplicable(
        "self.assertTrue(ddp.reducer._ddp_graph_static())",
        "reads from torch's reducer whether the graph is static",
        ("test_detect_ddp_is_actually_static",),
    ),
    NotApplicable(
        "dist._compute_bucket_assignment_by_size( tensors_sparse, [400], logger=net.logger )",
        "passes DDP's log to a private C++ function",
        ("test_compute_bucket_assignment_by_size_sparse_error_with_logger",),
    ),
    NotApplicable(
        "self.assertEqual(event_count, num_iters)",
        "counts the process group's all-reduces, which our exchange does not use",
        ("test_ddp_profiling_autograd_profiler", "test_ddp_profiling_torch_profiler"),
    ),
    NotApplicable(
        "with self.assertRaisesRegex(RuntimeError, expected_err):",
        "expects an error for a graph that changes despite static_graph; our exchanges handle it",
        ("test_invalid_static_graph",),
    ),
    NotApplicable(
        'base_model._get_ddp_logging_data().get("num_buckets_reduced"), 2',
        "reads the number of buckets from DDP's log",
        ("test_skip_all_reduce_unused_parameters",),
    ),
)
EXPECTED: dict[str, tuple[Entry, ...]] = {
    "ddp": _DDP,
    "auto": (_LOGGED_TIMES,),
    "allreduce": (),
    "tree": _OF_TORCHS_REDUCER,
    "host": _OF_TORCHS_REDUCER,
}


def entries(exchange: str) -> dict[str, Entry]:
    """Return the entries of the tests that do not pass with an exchange, by test."""
    return {test: entry for entry in EXPECTED.get(exchange, ()) for test in entry.tests}

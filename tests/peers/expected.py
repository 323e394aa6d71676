"""Tests of torch that pass with torch's class and not with ours, and how they end."""

_LOGGED_TIMES = {  # reads the reducer's times from DDP's log
    "test_ddp_logging_data_cpu": 'ddp_logging_data.get("forward_compute_time"), 1'
}
# Features that our exchanges refuse, by a part of the error.
_REFUSED = {
    "register_comm_hook requires exchange='allreduce'": (
        "test_ddp_comm_hook_logging",
        "test_ddp_hook_parity_allreduce",
        "test_ddp_hook_parity_allreduce_process_group",
        "test_ddp_hook_parity_powerSGD",
        "test_accumulate_gradients_no_sync_allreduce_hook",
        "test_accumulate_gradients_no_sync_allreduce_with_then_hook",
        "test_ddp_python_error_logged",
        "test_ddp_uneven_inputs",
    ),
    "mixed_precision requires exchange='allreduce'": (
        "test_ddp_native_mixed_precision_ignored_params",
    ),
}
# Tests of DDP's internals (its private attributes, log and messages), by the failing statement.
_INTERNALS = {
    # Expects DDP's advice to set TORCH_DISTRIBUTED_DEBUG; our error names the parameters.
    'self.assertTrue(s in msg, f"Expected {s} to be in {msg}")': (
        "test_ddp_unused_params_rebuild_buckets_exception",
    ),
    # Reads from DDP's log whether buckets were rebuilt.
    'static_model._get_ddp_logging_data().get("has_rebuilt_buckets", 0)': (
        "test_different_graph_across_ranks",
    ),
    # Reads a private table of torch's reducer.
    "local_used_map = model.reducer._get_local_used_map()": (
        "test_ddp_control_flow_same_across_ranks",
        "test_ddp_control_flow_different_across_ranks",
    ),
    # Reads from torch's reducer whether the graph is static.
    "self.assertTrue(ddp.reducer._ddp_graph_static())": ("test_detect_ddp_is_actually_static",),
    # Passes DDP's log to a private C++ function.
    "dist._compute_bucket_assignment_by_size( tensors_sparse, [400], logger=net.logger )": (
        "test_compute_bucket_assignment_by_size_sparse_error_with_logger",
    ),
    # Counts the process group's all-reduces, which our exchange does not use.
    "self.assertEqual(event_count, num_iters)": (
        "test_ddp_profiling_autograd_profiler",
        "test_ddp_profiling_torch_profiler",
    ),
    # Expects an error for a graph that changes despite static_graph; our exchanges handle it.
    "with self.assertRaisesRegex(RuntimeError, expected_err):": ("test_invalid_static_graph",),
    # Reads the number of buckets from DDP's log.
    'base_model._get_ddp_logging_data().get("num_buckets_reduced"), 2': (
        "test_skip_all_reduce_unused_parameters",
    ),
}
_OF_TORCHS_REDUCER = _LOGGED_TIMES | {
    test: part for part, tests in (_REFUSED | _INTERNALS).items() for test in tests
}
# For each exchange, a part of the error or of the failing statement of each test.
EXPECTED: dict[str, dict[str, str]] = {
    "auto": _LOGGED_TIMES,
    "allreduce": {},
    "tree": _OF_TORCHS_REDUCER,
    "host": _OF_TORCHS_REDUCER,
}

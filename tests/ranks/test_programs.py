"""Typical training programs, with equal results by paceline.DataParallel and DDP.

Each runs on two ranks with DistributedDataParallel and with every exchange, and is compared step by
step: losses, gradients, parameters, buffers, random streams, and how often the module ran. The
programs are in the folder `programs`.
"""

import pytest

from pair import RankFailed, Ranks
from programs_of_ranks import PROGRAMS, check, names_in

EXCHANGES = ("allreduce", "host", "host_chunk_1", "tree")
# "auto" begins with "allreduce"; these take many steps, or change the exchanged parameters.
OF_AUTO = ("compiled", "groups", "loops", "modes", "optimizers", "switching", "unused")
# Programs that run with every exchange in `make test`: each exchange has its own code for them.
ALL_QUICK = [
    "no_sync_in_all_micro_batches_but_the_last",
    "parameters_that_only_earlier_micro_batches_touch",
    "gradients_kept_over_steps",
    "gradients_deleted_by_some_ranks_only",
    "checkpoint_loaded_in_the_middle",
    "wrapper_saved_as_a_whole",
    "several_forwards_and_a_backward_for_each",
    "two_losses_of_one_forward_with_retain_graph",
    "order_of_use_that_differs_between_ranks",
    "error_in_the_middle_of_backward",
    "static_graph_with_an_unused_layer",
    "group_of_rank_1_alone",
    "group_in_another_order",
    "uneven_inputs_in_join",
    "uneven_inputs_with_accumulation_in_join",
    "parameters_and_buffers_to_ignore",
    "hook_of_the_user",
    "gradients_as_views_of_buckets",
    "parameters_whose_exchange_is_delayed",
    "output_changed_in_place",
    "empty_batch_on_one_rank",
    "forward_with_gradients_on_one_rank_before_a_barrier",
    "second_wrapper_while_the_first_lives",
    "wrapper_copied_in_the_middle",
    "first_step_in_eval_mode",
    "first_forward_without_backward_on_one_rank",
    "batch_norm_in_training_and_evaluation",
    "buffers_of_many_types_that_are_replaced",
    "clipping_by_norm_and_by_value",
    "two_wrappers_in_a_chain",
    "wgan_gp_with_double_backward",
    "parameters_of_several_types",
    "sparse_embedding",
    "parameters_that_are_not_contiguous",
    "gradients_infinite_on_one_rank",
    "layers_used_twice_in_reentrant_checkpoints_of_a_static_graph",
    "through_all_exchanges",
    "experts_through_all_exchanges",
    "copied_while_exchanges_are_tried",
    "other_experts_on_the_other_rank",
    "unused_parameter_that_nobody_seeks",
    "frozen_after_construction",
]
# Compiling takes seconds; `make test` runs only these.
COMPILED = ("compiled_before_with_the_eager_backend", "module_that_is_compiled_in_place")
IN_THREES = (
    "accumulation.gradients_kept_over_steps",
    "accumulation.no_sync_in_all_micro_batches_but_the_last",
    "graphs.order_of_use_that_differs_between_ranks",
    "graphs.tied_embedding_with_reentrant_checkpoints",
    "optimizers.clipping_by_norm_and_by_value",
)
FAULTS = {
    "differs_in_the_second_step": "step 1: module 0: gradients: 0.bias: ",
    "draws_a_number_too_many": "streams: torch: ",
    "runs_forward_once_too_often": "module 0: runs: 2, not 1",
    "raises_where_ddp_does_not": "raised ValueError: of ours alone, not went on",
}


def cases() -> list[object]:
    """Return all programs with all exchanges; most are marked slow."""
    found = []
    for name in names_in(PROGRAMS):
        file, _, own = name.partition(".")
        for exchange in (*EXCHANGES, *(["auto"] if file in OF_AUTO else [])):
            is_quick = exchange == "host" or own in ALL_QUICK
            is_quick &= file != "compiled" or own in COMPILED
            is_quick &= file != "switching" or exchange == "auto"
            found.append(pytest.param(name, exchange, marks=[] if is_quick else pytest.mark.slow))
    return found


@pytest.mark.parametrize(("name", "exchange"), cases())
def test_a_program_is_the_same_as_with_ddp(pair, name, exchange, request):
    deadline_s = 45 if request.node.get_closest_marker("slow") is None else 300
    pair(check, PROGRAMS, name, exchange, "ddp", group=False, deadline_s=deadline_s)


@pytest.mark.parametrize("exchange", ["host", "tree"])
@pytest.mark.parametrize("name", IN_THREES)
def test_a_program_is_the_same_on_three_ranks_too(triple: Ranks, name: str, exchange: str):
    triple(check, PROGRAMS, name, exchange, "ddp", group=False)


@pytest.mark.parametrize("name", FAULTS)
def test_differences_from_ddp_are_reported(pair: Ranks, name: str):
    with pytest.raises(RankFailed) as caught:
        pair(check, PROGRAMS / "faulty", f"faulty.{name}", "host", "ddp", group=False)
    assert FAULTS[name] in str(caught.value)

"""DeepSpeed's own formulas and the table of its documentation."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from nbaccel.deepspeed.official_formulas import deepspeed_table
from nbaccel.errors import ConfigError
from tests.deepspeed.needs import DEEPSPEED

# What DeepSpeed warns of when it is imported is not tested here.
pytestmark = [DEEPSPEED, pytest.mark.filterwarnings("ignore")]

# DeepSpeed's documentation, "Memory Requirements": T0_3B on one GPU.
PUBLISHED = """\
   70.00 |     0.25 | offload_param=cpu , offload_optimizer=cpu , zero_init=1
   70.00 |     0.25 | offload_param=cpu , offload_optimizer=cpu , zero_init=0
   62.23 |     5.43 | offload_param=none, offload_optimizer=cpu , zero_init=1
   62.23 |     5.43 | offload_param=none, offload_optimizer=cpu , zero_init=0
    0.37 |    46.91 | offload_param=none, offload_optimizer=none, zero_init=1
   15.56 |    46.91 | offload_param=none, offload_optimizer=none, zero_init=0"""


def test_the_published_table_is_reproduced_to_the_digit():
    table = deepspeed_table((2_783_959_040, 65_798_144))
    assert "\n".join(str(table).splitlines()[2:]) == PUBLISHED


def test_rounded_counts_give_another_table():
    """So the digits above are a test of the count, too."""
    assert str(deepspeed_table((2_783_000_000, 65_000_000)).rows[0]).split()[0] == "69.98"


def test_zero_2_has_one_line_with_offload_and_one_without():
    with_offload, without = deepspeed_table((1_000_000, 1_000), stage=2).rows
    assert (with_offload.host_bytes, with_offload.device_bytes) == (24_000_000, 2_000_000)
    assert (without.host_bytes, without.device_bytes) == (6_000_000, 20_000_000)


def test_there_is_no_table_for_stage_1():
    with pytest.raises(ConfigError, match=r"stage=1 has no table.*estimate_memory"):
        deepspeed_table((10, 5), stage=1)


@given(
    total=st.integers(1, 10**12),
    layer=st.integers(1, 10**9),
    devices=st.integers(1, 16),
    nodes=st.integers(1, 64),
    factor=st.floats(1, 4),
)
def test_a_row_of_zero_3_says_what_deepspeed_says_of_its_options(
    total, layer, devices, nodes, factor
):
    from deepspeed.runtime.zero.stage3 import estimate_zero3_model_states_mem_needs

    layer = min(layer, total)
    table = deepspeed_table(
        (total, layer), devices_per_node=devices, num_nodes=nodes, buffer_factor=factor
    )
    for row in table.rows:
        options = dict(row.options)
        host, device, _ = estimate_zero3_model_states_mem_needs(
            total_params=total,
            largest_layer_params=layer,
            num_gpus_per_node=devices,
            num_nodes=nodes,
            cpu_offload=options["offload_optimizer"] == "cpu",
            cpu_offload_params=options["offload_param"] == "cpu",
            zero_init=options["zero_init"] == "1",
            additional_buffer_factor=factor,
        )
        assert (row.host_bytes, row.device_bytes) == (host, device)


@given(
    total=st.integers(1, 10**12),
    devices=st.integers(1, 16),
    nodes=st.integers(1, 64),
    factor=st.floats(1, 4),
)
def test_a_row_of_zero_2_says_what_deepspeed_says_of_its_options(total, devices, nodes, factor):
    from deepspeed.runtime.zero.stage_1_and_2 import estimate_zero2_model_states_mem_needs

    table = deepspeed_table(
        (total, 1), stage=2, devices_per_node=devices, num_nodes=nodes, buffer_factor=factor
    )
    for row in table.rows:
        needs = estimate_zero2_model_states_mem_needs(
            total_params=total,
            num_gpus_per_node=devices,
            num_nodes=nodes,
            cpu_offload=dict(row.options)["offload_optimizer"] == "cpu",
            additional_buffer_factor=factor,
        )
        assert (row.host_bytes, row.device_bytes) == needs

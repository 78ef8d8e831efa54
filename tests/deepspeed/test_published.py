"""DeepSpeed's own formulas and the table of its documentation."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nbaccel.deepspeed.published import deepspeed_table, zero2_needs, zero3_needs
from nbaccel.deepspeed.shape import Shape
from nbaccel.errors import ConfigError
from tests.deepspeed.needs import DEEPSPEED

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


numbers = {
    "total": st.integers(1, 10**12),
    "layer": st.integers(1, 10**9),
    "devices": st.integers(1, 16),
    "nodes": st.integers(1, 64),
    "factor": st.floats(1, 4),
    "optimizer": st.booleans(),
}


@DEEPSPEED
@pytest.mark.filterwarnings("ignore")  # what DeepSpeed warns of when imported is not tested here
@given(param=st.booleans(), zero_init=st.booleans(), **numbers)
def test_zero_3_needs_are_deepspeeds_own(
    total, layer, devices, nodes, factor, optimizer, param, zero_init
):
    from deepspeed.runtime.zero.stage3 import estimate_zero3_model_states_mem_needs as theirs

    host, device, _ = theirs(total, layer, devices, nodes, optimizer, param, zero_init, factor)
    assert (host, device) == zero3_needs(
        Shape(total=total, largest_layer=layer, trainable=total),
        devices_per_node=devices,
        num_nodes=nodes,
        offload_optimizer=optimizer,
        offload_param=param,
        zero_init=zero_init,
        buffer_factor=factor,
    )


@DEEPSPEED
@pytest.mark.filterwarnings("ignore")
@given(**numbers)
def test_zero_2_needs_are_deepspeeds_own(total, layer, devices, nodes, factor, optimizer):
    from deepspeed.runtime.zero.stage_1_and_2 import (
        estimate_zero2_model_states_mem_needs as theirs,
    )

    assert theirs(total, devices, nodes, optimizer, factor) == zero2_needs(
        Shape(total=total, largest_layer=layer, trainable=total),
        devices_per_node=devices,
        num_nodes=nodes,
        offload_optimizer=optimizer,
        buffer_factor=factor,
    )

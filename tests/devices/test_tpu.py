from __future__ import annotations

import pytest

from nbaccel.devices.tpu import count_chips


@pytest.fixture
def host(tmp_path):
    def build(*, nodes=(), bus=()):
        for name in nodes:
            path = tmp_path / "dev" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch()
        for slot, (vendor, device) in enumerate(bus):
            folder = tmp_path / f"sys/bus/pci/devices/0000:00:0{slot}.0"
            folder.mkdir(parents=True)
            (folder / "vendor").write_text(f"{vendor}\n")
            (folder / "device").write_text(f"{device}\n")
        return tmp_path

    return build


CHIP = ("0x1ae0", "0x0063")
NETWORK = ("0x1ae0", "0x0042")
DISK = ("0x1ae0", "0x001f")
HINT = {"TPU_WORKER_ID": "0"}


@pytest.mark.parametrize(
    ("nodes", "bus", "environ", "chips"),
    [
        ((), (), {}, 0),
        ((), (), HINT, 0),
        (("accel0", "accel1", "accel2", "accel3"), (), {}, 4),
        (("accel/accel0",), (), {}, 0),  # Linux's own folder for accelerators of other makers
        (("vfio/0", "vfio/1", "vfio/vfio"), (CHIP, CHIP), {}, 2),
        (("vfio/0",), (CHIP, CHIP, CHIP, CHIP), {}, 1),
        ((), (CHIP, CHIP), {}, 0),  # on the bus, not handed to this container
        (("vfio/0", "vfio/1"), (NETWORK, DISK), {}, 0),
        (("vfio/0", "vfio/1"), (), HINT, 2),
        (("vfio/0", "vfio/1"), (), {"PJRT_DEVICE": "tpu"}, 2),
        (("vfio/0",), (), {"PJRT_DEVICE": "CPU"}, 0),
        (("vfio/0",), (), {"TPU_NAME": ""}, 0),
    ],
)
def test_chips(host, nodes, bus, environ, chips):
    assert count_chips(environ, host(nodes=nodes, bus=bus)) == chips

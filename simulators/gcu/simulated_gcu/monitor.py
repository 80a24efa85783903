"""The output of ``efsmi`` for simulated cards, in the format that users of real cards have published."""

from __future__ import annotations

import os
import re

import simulated_gcu

__all__ = ["report"]

_S60 = """\
+2025-07-21, 03:50:09 UTC----------------------------------------------------+
| EFSMI    1.4.0.505       Driver Ver: 1.4.4.501                             |
|----------------------------------------------------------------------------|
|----------------------------------------------------------------------------|
| DEV    NAME                 | FW VER           | BUS-ID      ECC           |
| TEMP   Dpm   Pwr(Usage/Cap) | Mem     GCU Virt | DUsed       SN            |
"""
_S60_CARD = """\
|----------------------------------------------------------------------------|
| {index:<6} {name:<20} | 33.6.5           | 00:{bus:02x}:00.0  Disable       |
| 39 C   Sleep    105W  300W  | {memory:>5}MiB Disable | 0.0%        SIM{index:09} |
+----------------------------------------------------------------------------+
"""
_L600 = """\
+2026-03-06, 10:12:03 CST-----------------------------------------------------+
| EFSMI: 1.7.2.14          Driver Ver: 1.7.2.14                               |
+-----------------------------+-------------------+---------------------------+
| DEV    NAME                 | Boot FW VER       | BUS-ID      ECC           |
| TEMP   Lpm   Pwr(Usage/Cap) | Mem      GCU Virt | DUsed       SN            |
|=============================================================================|
"""
_L600_CARD = """\
| {index:<6} {name:<20} | 40.2.8.3          | 00:{bus:02x}:00.0  Enable        |
| 35     LP1      68W / 300W  | {memory:>6}MiB Disable | 0%         SIM{index:09} |
+-----------------------------+-------------------+---------------------------+
"""
_T20 = """\
-----------------------------------------------------------------------
----------------- Enflame System Management Interface -----------------
-------- Enflame Tech, All Rights Reserved. 2023 Copyright (C) --------
-----------------------------------------------------------------------

*Sat Oct  7 15:54:28 2023-------------------------------------------------*
*EFSMI    V1.20.0          Driver Ver: 2.4.20230829                       *
*-------------------------------------------------------------------------*
*-------------------------------------------------------------------------*
* DEV    NAME                | FW VER          | BUS-ID     ECC           *
* TEMP   DPM   Pwr(Usage/Cap)| Mem         vGCU| DEV-Util   UUID          *
"""
_T20_CARD = """\
*-------------------------------------------------------------------------*
* {index:<6} {name:<19} | 10.19.3         | 00:{bus:02x}:0.0  Enable        *
* 30C    Sleep   48.0W  300W | {gib:<3}G     Disable|   0.0%     SIM{index:09}  *
*-------------------------------------------------------------------------*
"""
_DETAILED = """\
DEV ID {index}
    Driver Info
        Ver                     : 1.4.3.4
    Device Info
        Dev Name                : {name}
        Dev UUID                : GCU-simulated-{index}
    PCIe Info
        Domain                  : 0000
        Bus                     : {bus:02x}
        Dev                     : 00
        Func                    : 0
    Power Info
        Power Capa              : 300 W
        Cur Power               : 105 W
        Dpm Level               : Sleep
    Device Mem Info
        Mem Size                : {memory} MiB
        Mem Usage               : 0 MiB
    Temperature Info
        GCU Temp                : 39 C
    Device Usage Info
        GCU Usage               : 0.0 %
"""
_CARDS = {
    "s60": ("Enflame S60", _S60, _S60_CARD),
    "l600": ("Enflame L600", _L600, _L600_CARD),
    "t20": ("T20", _T20, _T20_CARD),
}
_UNITS = {"GiB": 1 << 30, "MiB": 1 << 20, "KiB": 1 << 10, "": 1}


def report(detailed: bool = False) -> str:
    """All cards of the machine, including those that ``TOPS_VISIBLE_DEVICES`` hides; they are always shown as idle.

    Args:
        detailed: the report of ``efsmi -q`` instead of the table.

    Raises:
        RuntimeError: a variable ``SIM_GCU_...`` has an invalid value.
    """
    legacy = simulated_gcu.generation() == "legacy"
    profile = "t20" if legacy else os.environ.get("SIM_GCU_PROFILE") or "s60"
    if profile not in _CARDS or (profile == "t20") != legacy:
        raise RuntimeError(f"SIM_GCU_PROFILE={profile} is no card; write s60 or l600, or leave it out")
    name, head, row = _CARDS[profile]
    memory = _mebibytes(os.environ.get("SIM_GCU_MEMORY") or ("32GiB" if legacy else "42GiB"))
    cards = [
        (_DETAILED if detailed else row).format(index=i, name=name, bus=i + 1, memory=memory, gib=memory // 1024)
        for i in range(simulated_gcu.total_count())
    ]
    return ("" if detailed else head) + "".join(cards)


def _mebibytes(text: str) -> int:
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(GiB|MiB|KiB|)", text.strip())
    if found is None:
        raise RuntimeError(f"SIM_GCU_MEMORY={text} is no size; write 512MiB, 42GiB or bytes")
    return int(float(found[1]) * _UNITS[found[2]]) >> 20

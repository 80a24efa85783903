"""The learning rate that a schedule gives, as ``metrics.jsonl`` has it."""

from __future__ import annotations

import pytest

from tests.behaviour.conftest import ran, result

# Box and Jenkins, Time Series Analysis (1976), series G: passengers in thousands, monthly from January 1949.
AIRLINE = """112 118 132 129 121 135 148 148 136 119 104 118 115 126 141 135 125 149 170 170 158 133 114 140
145 150 178 163 172 178 199 199 184 162 146 166 171 180 193 181 183 218 230 242 209 191 172 194
196 196 236 235 229 243 264 272 237 211 180 201 204 188 235 227 234 264 302 293 259 229 203 229
242 233 267 269 270 315 364 347 312 274 237 278 284 277 317 313 318 374 413 405 355 306 271 306
315 301 356 348 355 422 465 467 404 347 305 336 340 318 362 348 363 435 491 505 404 359 310 337
360 342 406 396 420 472 548 559 463 407 362 405 417 391 419 461 472 535 622 606 508 461 390 432"""


def test_a_short_series_of_ones_own_learns_and_a_rate_that_vanishes_is_said(exp):
    rows = [f"{1949 + month // 12}-{month % 12 + 1:02d}-01,{value}" for month, value in enumerate(AIRLINE.split())]
    exp.path("airline.csv").write_text("\n".join(["date,passengers", *rows]) + "\n")
    words = ["data=csv", "data.name=airline", f"data.root={exp.folder}", "data.file=airline.csv", "data.channels=1",
             "data.lookback=24", "data.horizon=12", "model.period=12", "max_epochs=30", "plots=false"]  # fmt: skip
    ran(exp, *words, "output_dir=own")
    learned = result(exp.path("own"))
    assert (learned["steps"], learned["data"]["season"]) == (30, 12)
    assert learned["metrics"]["mse_seasonal_naive"] == pytest.approx(0.4732, abs=1e-4)
    assert learned["metrics"]["mse"] < 0.35
    assert "warnings" not in learned["data"]
    done = ran(exp, *words, "schedule=halving", "output_dir=halved")
    halved = result(exp.path("halved"))
    assert halved["metrics"]["mse"] > 1.0
    (worse, rate) = halved["data"]["warnings"]
    assert "the last 12 rows (0.4732)" in worse
    assert "learning rate was below 1% of its peak after step 8 of 30" in rate
    assert rate in done.stdout

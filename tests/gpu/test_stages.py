"""Each stage of the acceptance as a test: `pytest -m gpu`, or one of them: `pytest -m gpu -k weights`."""

import pytest

from tests.gpu.report import table
from tests.gpu.stage import Context, Stage, run_stage
from tests.gpu.stages import STAGES


@pytest.mark.gpu
@pytest.mark.timeout(600)
@pytest.mark.parametrize("stage", STAGES, ids=lambda stage: stage.name)
def test_stage(stage: Stage, context: Context) -> None:
    result = run_stage(stage, context, show=lambda row: print(row.what, row.seen, sep=": "))
    if result.not_run:
        pytest.skip(result.not_run)
    assert result.passed, table([result])

"""A run's domains and curriculum, made from its config: the sampler's quotas, and the loader that draws its prompts."""

import logging
import os
from collections.abc import Callable, Mapping
from typing import Any

from omegaconf import DictConfig

from verl_ext.settings import Curriculum as CurriculumSettings
from verl_ext.settings import Domain
from verl_ext.settings.domains import check_sources, read_domains
from verl_ext.trainer.curriculum import Curriculum
from verl_ext.trainer.domains import ONLY, Domains
from verl_ext.trainer.loader import DomainLoader

logger = logging.getLogger(__name__)
logger.setLevel(os.getenv("VERL_LOGGING_LEVEL", "INFO"))


def make_domains(config: DictConfig, table: Mapping[str, Domain]) -> Domains:
    """Return the domains that a run's sampler and loader share. `table`: from `read_domains`; it may be empty."""
    weights = {name: domain.weight for name, domain in table.items()} or {ONLY: 1.0}
    limits = {name: domain.max_staleness for name, domain in table.items() if domain.max_staleness is not None}
    return Domains(weights, config.data.train_batch_size, limits)


def check_rows(config: DictConfig, datasets: Mapping[str, Any]) -> None:
    """Check that a run's table has a domain for each row. `datasets`: `train` and `val` -> verl's.

    Raises:
        ValueError: as `settings.domains.check_sources`.
    """
    if read_domains(config):
        for split, dataset in datasets.items():
            check_sources(config, split, _sources(dataset))


def make_loader(
    config: DictConfig,
    verls: Any,
    domains: Domains,
    choose: Callable[[], str],
    curriculum: CurriculumSettings | None,
) -> tuple[DomainLoader, Curriculum | None]:
    """Return the loader of a run with domains or a curriculum, and the curriculum, which listens to the run.

    Args:
        verls: verl's loader of the training rows.
        choose: see `DomainLoader`.
    Raises:
        ValueError: verl would take several prompts at once from the loader.
    """
    data = config.data
    if (size := data.get("gen_batch_size") or data.train_batch_size) != 1:
        raise ValueError(
            f"retool.domains and retool.curriculum draw prompts one at a time, but verl would take {size} at once. Set "
            "data.gen_batch_size=1."
        )
    sources = _sources(verls.dataset) if domains.are_several else [ONLY] * len(verls.dataset)
    rows: dict[str, list[int]] = {name: [] for name in domains.weights}
    for number, source in enumerate(sources):
        rows[source].append(number)
    seed = (data.get("seed") or 0) if data.shuffle else None
    pools = None
    if curriculum:
        pools = Curriculum(curriculum, {name: len(rows[name]) for name in domains.quotas.shares()}, data.get("seed"))
    loader = DomainLoader(
        verls.dataset, verls.collate_fn, rows, domains=domains, choose=choose, seed=seed, curriculum=pools
    )
    return loader, pools


def drop_state_of_domains(loader: Any) -> None:
    """Let a loader begin anew if the checkpoint is of a run with domains or a curriculum, and this run has neither.

    Args:
        loader: verl's, which has been given the checkpoint's state and has not looked at it yet.
    """
    if not isinstance(loader, DomainLoader) and "orders" in (loader.next_iter_state or {}):
        logger.warning(
            "The checkpoint is of a run with domains or a curriculum, which this run has not: the order of prompts "
            "begins anew."
        )
        loader.load_state_dict(None)


def _sources(dataset: Any) -> list[str]:
    frame = getattr(dataset, "dataframe", None)  # a custom class may have none
    if frame is not None:
        return list(frame["data_source"])
    return [dataset[i]["data_source"] for i in range(len(dataset))]

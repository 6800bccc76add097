"""The order in which the trainer asks for rows, against speculators' own data loaders."""

import numpy as np
import pytest
import torch
from hs_connectors import HiddenStatesTransfer
from speculators.train import dataloader
from speculators.train.dataloader import create_train_val_loaders

from aerie.artefacts.corpus import DATASET_FOLDER, train_data_ratio
from aerie.errors import Failed
from aerie.training.checkpoints import BatchPlan, Progress
from aerie.training.stream_order import StreamOrder, Use, chunks

SEQUENCE = 64


class Asked(HiddenStatesTransfer):
    """A transfer that remembers what it was asked for, and answers with states of the right shape."""

    def __init__(self, ids):
        self.ids, self.rows = ids, []

    def get_cached(self, file_idx):
        self.rows.append(file_idx)
        tokens = torch.tensor(self.ids[file_idx])
        return {"token_ids": tokens, "hidden_states": torch.zeros(len(tokens), 4, 8)}

    def get_generated(self, hs_transfer_params):
        raise AssertionError(hs_transfer_params)


@pytest.fixture
def corpus(edition):
    random = np.random.default_rng(3)
    ids = [random.integers(2, 40, size=int(random.integers(8, 40))).tolist() for _ in range(70)]
    edition.merge(ids, train_rows=60)
    return edition.files.corpus / DATASET_FOLDER, ids


def order_of(ids, *, processes=1, epochs=3, seed=7):
    lengths = [len(row) for row in ids]
    return StreamOrder(
        train=BatchPlan(lengths[:60], SEQUENCE, processes, seed),
        validation=BatchPlan(lengths[60:], SEQUENCE, processes, 0),
        epochs=epochs,
    )


def loaders(dataset, transfer, *, seed=7):
    return create_train_val_loaders(
        data_path=str(dataset), total_seq_len=SEQUENCE, hidden_states_dtype=torch.float32, transfer=transfer,
        vllm_endpoint="", on_missing="raise", verifier_name_or_path="", request_timeout=None, max_retries=0,
        generation_validation_retries=0, max_consecutive_generation_failures=1, hidden_size=8, num_target_layers=3,
        num_workers=0, prefetch_factor=4, preprocess=None, train_data_ratio=train_data_ratio(60, 70), seed=seed,
    )  # fmt: skip


def ask(loader, epoch, *, after_step=0):
    sampler = loader.batch_sampler
    sampler.set_epoch(epoch)
    if after_step:  # as Trainer._prepare_resume_skip does
        sampler._cached_generated_batches = (epoch, sampler._generate_batches(epoch)[after_step:])
    for _ in loader:
        pass


def test_rows_come_in_the_order_in_which_speculators_loaders_ask_for_them(corpus):
    dataset, ids = corpus
    transfer = Asked(ids)
    train, validation = loaders(dataset, transfer)
    for epoch in range(3):
        ask(train, epoch)
        ask(validation, epoch)
    uses = list(order_of(ids).uses(None))
    assert [use.row for use in uses] == transfer.rows
    assert sorted(use.row for use in uses if use.epoch == 1) == list(range(70))


def test_a_training_resumed_inside_an_epoch_asks_for_the_rest_of_it(corpus):
    dataset, ids = corpus
    transfer = Asked(ids)
    train, validation = loaders(dataset, transfer)
    ask(train, 1, after_step=5)
    ask(validation, 1)
    ask(train, 2)
    ask(validation, 2)
    resumed = order_of(ids).uses(Progress(epoch=1, local_step=5, global_step=33))
    assert [use.row for use in resumed] == transfer.rows


def test_a_training_resumed_behind_an_epoch_begins_with_the_next(corpus):
    _, ids = corpus
    order = order_of(ids)
    everything = list(order.uses(None))
    assert list(order.uses(Progress(epoch=0, local_step=0, global_step=28))) == [u for u in everything if u.epoch > 0]
    assert list(order.uses(Progress(epoch=2, local_step=0, global_step=84))) == []


def test_no_process_reads_a_later_step_than_others_before_its_rows_come(corpus, monkeypatch):
    dataset, ids = corpus
    by_rank = []
    for rank in range(2):
        monkeypatch.setattr(dataloader, "get_dp_size", lambda: 2)
        monkeypatch.setattr(dataloader, "get_dp_rank", lambda rank=rank: rank)
        sampler = loaders(dataset, Asked(ids))[0].batch_sampler
        by_rank.append([list(map(int, batch)) for batch in sampler])
    steps = [row for step in zip(*by_rank, strict=True) for batch in step for row in batch]
    order = order_of(ids, processes=2, epochs=1)
    assert [use.row for use in order.uses(None)][: len(steps)] == steps


def test_a_chunk_stays_below_its_limit_and_ends_with_the_epoch():
    uses = [Use(0, row) for row in range(5)] + [Use(1, row) for row in (4, 0)]
    sizes = [3, 3, 3, 9, 1]
    assert list(chunks(uses, sizes.__getitem__, 9)) == [[0, 1, 2], [3], [4], [4, 0]]


def test_a_row_larger_than_a_chunk_is_refused_and_not_waited_for():
    with pytest.raises(Failed, match="corpus row 1 takes 10 bytes"):
        list(chunks([Use(0, 0), Use(0, 1)], [9, 10].__getitem__, 9))

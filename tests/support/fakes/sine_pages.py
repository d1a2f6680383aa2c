"""The pages of a sine model's slots, which hold nothing: who is given or steps into another's fails loudly."""

import numpy as np
import torch


class SinePages:
    """`table` [slots + 1, pages a slot] int32, which the engine writes too; whether slots are `done` [slots + 1]."""

    def __init__(self, capacity):
        self._capacity, self.done = capacity, torch.ones(capacity.slots + 1).bool()
        self.table = torch.full((capacity.slots + 1, capacity.pages_per_slot), capacity.pages, dtype=torch.int32)
        self._begins = torch.zeros(capacity.slots + 1).long()

    def check(self, given, positions):
        assert len(set(given)) * self._capacity.page_positions >= positions
        assert set(given) <= set(range(self._capacity.pages)), "the last page is scratch"

    def hold(self, slot, given, positions, cached):
        """`slot` is given pages for a prompt of `positions`, of which the first `cached` are shared."""
        own = torch.tensor(given[cached // self._capacity.page_positions :])
        assert not torch.isin(self.table[~self.done], own).any(), "two slots have the same page"
        self.table[slot], self._begins[slot] = self._capacity.pages, positions
        self.table[slot, : len(given)] = torch.tensor(given)

    def step(self, slots, at):
        """`slots` that are not done make their frames number `at`: arrays both."""
        table, page = self.table.numpy(), (self._begins.numpy()[slots] - 1 + at) // self._capacity.page_positions
        own = table[slots, page]
        assert (own < self._capacity.pages).all(), "a slot was stepped beyond its pages"
        held = np.bincount(table[~self.done.numpy()].ravel(), minlength=self._capacity.pages)
        assert (held[own] == 1).all(), "two slots have the same page"

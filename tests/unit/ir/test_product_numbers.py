"""Numbered products say the same as the table."""

from __future__ import annotations

import random

from pipeloom.ir.product_numbers import ProductNumbers
from tests.support.random_programs import make_program


def test_patterns_are_the_table() -> None:
    rng = random.Random("numbers")
    for _ in range(100):
        program = make_program(rng, written=rng.random() < 0.5, sharded=True)
        table = program.dependencies
        numbers = ProductNumbers(table)
        for action in program.all_actions():
            pattern = numbers.pattern_of(action)
            shift = action.microbatch or 0
            for bases, products in (
                (pattern.needs, table.needs(action)),
                (pattern.produces, table.produces(action)),
            ):
                assert [numbers.product_of(base + shift) for base in bases] == list(products)
                assert [numbers.number_of(p) for p in products] == [b + shift for b in bases]


def test_different_products_have_different_numbers() -> None:
    rng = random.Random("different")
    for _ in range(30):
        program = make_program(rng, written=True, sharded=True)
        table = program.dependencies
        numbers = ProductNumbers(table)
        products = {p for action in program.all_actions() for p in table.produces(action)}
        assert len({numbers.number_of(product) for product in products}) == len(products)
        assert all(numbers.number_of(product) < numbers.count for product in products)

"""Sentences of every everyday kind, filled with words of the lexicon: statements, questions, orders, lists, numbers.

Sentences are grammatical, their meaning is random. Numbers are written as figures, which the normaliser spells out.
"""

from __future__ import annotations

import random
import string
import tomllib
from pathlib import Path

from builtin_voice.words import Lexicon, with_article

PHRASES: dict[str, list[str]] = tomllib.loads(Path(__file__).with_name("phrases.toml").read_text("ascii"))


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


class Writer:
    """Generates random sentences, with all randomness from `rng`."""

    def __init__(self, lexicon: Lexicon, rng: random.Random) -> None:
        self._words, self._rng = lexicon, rng

    def sentence(self) -> str:
        """A sentence of 1 to about 20 words, with its capital and its mark."""
        kinds = (
            self._statement,
            self._linked,
            self._order,
            self._question,
            self._copula,
            self._list,
            self._speech,
            self._reply,
        )
        return _capital(self._rng.choices(kinds, (34, 16, 14, 14, 12, 4, 4, 2))[0]())

    def number_sentence(self) -> str:
        """A sentence with a number, a date, a time or a sum of money in figures."""
        rng, noun = self._rng, self.noun()
        many, moved = self._words.plural(noun), self._words.past(self._words.intransitive.draw(rng))
        number = rng.choice(
            (
                rng.randint(0, 20),
                rng.randint(0, 100),
                rng.randint(0, 1000),
                rng.randint(1000, 99999),
                rng.randint(1000, 999999),
                10 ** rng.randint(1, 6),
            )
        )
        year, day, hour, minute = rng.randint(1100, 2099), rng.randint(1, 31), rng.randint(1, 12), rng.randint(0, 59)
        date = f"{rng.choice(PHRASES['months'])} {day}{_suffix(day)}"
        return rng.choice(
            (
                f"There are {number:,} {many} {self.place()}.",
                f"{number:,} {many} {moved}{self._rest()}.",
                f"{_capital(self.clause())}, and {number:,} {many} {moved}.",
                f"It cost {rng.choice('$£€')}{number:,}.{rng.randint(0, 99):02d} in {year}{self._rest()}.",
                f"From {rng.randint(0, 9999)} to {number:,} {many}{self._rest()}.",
                f"The {noun} costs ${rng.randint(1, 300)}.{rng.randint(0, 99):02d}.",
                f"{self._somebody()} paid {rng.choice('$£€')}{number:,} for {self.thing()}.",
                f"In {year}, {self.clause()}.",
                f"On {rng.choice(PHRASES['days'])}, {date}, {self.clause()}.",
                f"It was {date}, {year}.",
                f"The {noun} starts at {hour}:{minute:02d} {rng.choice(('a.m.', 'p.m.'))}",
                f"Is it {hour}:{minute:02d} already?",
                f"About {rng.randint(1, 99)}% of {many} are {self._adjective()}.",
                f"This is the {day}{_suffix(day)} {noun}.",
                f"{number}, {rng.randint(0, 100)}, {rng.randint(0, 100)}.",
                f"The answer is {rng.randint(0, 99)}.{rng.randint(0, 999)}.",
                f"Turn to page {rng.randint(1, 600)}, please.",
                f"Call {rng.randint(200, 999)}-{rng.randint(0, 9999):04d}.",
                f"{_capital(self.thing())} weighs {rng.randint(1, 90)} kg.",
                f"It was {rng.randint(-30, 45)}°C{self._rest()}.",
                f"{self._somebody()} went {rng.randint(2, 999)} km at {rng.randint(2, 300)} km/h{self._rest()}.",
                f"In the {rng.randint(11, 20)}{rng.randint(2, 9)}0s, {self.clause()}.",
                f"{rng.randint(1, 99)}/{rng.choice((2, 3, 4, 5, 8, 10, 100))} of the {many} {moved}{self._rest()}.",
                f"They want {rng.choice('$£€')}{rng.randint(1, 900)} million, {number:,} emails & {many}, etc.",
                f"The {self._letters()} and the {self._letters()} {self._words.past('ask')} about {number:,} {many}.",
                f"{rng.randint(1, 99)} plus {rng.randint(1, 99)} is {rng.randint(2, 198)}.",
                f"{rng.choice(PHRASES['names'])} is {rng.randint(1, 99)} years old.",
                f"Room {rng.randint(1, 999)}, {rng.choice(('first', 'second', 'third', 'top'))} floor.",
            )
        )

    def _letters(self) -> str:
        """An abbreviation that is read letter by letter."""
        return "".join(f"{letter}." for letter in self._rng.choices(string.ascii_uppercase, k=self._rng.randint(2, 4)))

    def noun(self) -> str:
        """A noun, of any kind."""
        kinds, weights = (
            ("any", "artifact", "person", "place", "object", "animal", "food", "body"),
            (40, 20, 12, 8, 6, 5, 5, 4),
        )
        return self._words.nouns[self._rng.choices(kinds, weights)[0]].draw(self._rng)

    def _adjective(self) -> str:
        return self._words.adjectives.draw(self._rng)

    def thing(self) -> str:
        """A noun phrase in the third person singular."""
        noun = self.noun()
        phrase = f"{self._adjective()} {noun}" if self._rng.random() < 0.4 else noun
        determiner = self._rng.choice(PHRASES["determiners"])
        phrase = with_article(phrase) if determiner == "a" else f"{determiner} {phrase}"
        return (
            f"{phrase} of {self._rng.choice(PHRASES['determiners'][:4])} {self.noun()}"
            if self._rng.random() < 0.1
            else phrase
        )

    def _things(self) -> str:
        noun = self._words.plural(self.noun())
        phrase = f"{self._adjective()} {noun}" if self._rng.random() < 0.4 else noun
        return f"{self._rng.choice(PHRASES['plural_determiners'])} {phrase}".strip()

    def _somebody(self) -> str:
        rng = self._rng
        name = rng.choice(PHRASES["names"]) if rng.random() < 0.5 else rng.choice(self._words.proper)
        return rng.choice(
            (
                name,
                f"{rng.choice(PHRASES['titles'])} {rng.choice(self._words.proper)}",
                f"{rng.choice(PHRASES['names'])} {rng.choice(self._words.proper)}",
            )
        )

    def _subject(self) -> tuple[str, str]:
        """A subject and the form of "be" that goes with it."""
        kind = self._rng.random()
        if kind < 0.35:
            return self.thing(), "is"
        if kind < 0.55:
            return self._things(), "are"
        if kind < 0.65:
            return self._somebody(), "is"
        pronoun = self._rng.choice(PHRASES["subjects"])
        return pronoun, {"I": "am", "he": "is", "she": "is", "it": "is"}.get(pronoun, "are")

    def object(self) -> str:
        """What a verb may be followed by."""
        kinds = (self.thing, self._things, self._somebody, lambda: self._rng.choice(PHRASES["objects"]))
        return self._rng.choices(kinds, (50, 25, 5, 20))[0]()

    def place(self) -> str:
        """A preposition and what it goes with."""
        what = self.thing() if self._rng.random() < 0.7 else self._things()
        return f"{self._rng.choice(PHRASES['prepositions'])} {what}"

    def _rest(self) -> str:
        """Nothing, an adverb, a time or a place, with its leading space."""
        rest = self._rng.choices(
            ("", self._words.adverbs.draw(self._rng), self._rng.choice(PHRASES["times"]), self.place()),
            (35, 12, 13, 40),
        )[0]
        return f" {rest}" if rest else ""

    def _predicate(self) -> tuple[str, str]:
        """A verb in its plain form and what follows it."""
        if self._rng.random() < 0.65:
            return self._words.transitive.draw(self._rng), f" {self.object()}{self._rest()}"
        return self._words.intransitive.draw(self._rng), self._rest()

    def clause(self) -> str:
        """A subject with its verb and what follows, without capital and mark."""
        words, (subject, be), (verb, rest) = self._words, self._subject(), self._predicate()
        was = "was" if be in ("is", "am") else "were"
        plain = be in ("are", "am")
        tense = self._rng.choices(range(7), (40, 16, 14, 8, 6, 10, 6))[0]
        if tense == 0:
            return f"{subject} {words.past(verb)}{rest}"
        if tense == 1:
            return f"{subject} {verb if plain else words.third_person(verb)}{rest}"
        if tense == 2:
            return f"{subject} {self._rng.choice(PHRASES['modals'])} {verb}{rest}"
        if tense == 3:
            return f"{subject} {self._rng.choice((be, was))} {words.gerund(verb)}{rest}"
        if tense == 4:
            return f"{subject} {'have' if plain else 'has'} {words.participle(verb)}{rest}"
        if tense == 5:
            return f"{subject} {was} {words.participle(words.transitive.draw(self._rng))}{self._rest()}"
        return f"{subject} {'do not' if plain else 'does not'} {verb}{rest}"

    def _statement(self) -> str:
        return f"{self.clause()}{self._rng.choices('.!', (95, 5))[0]}"

    def _linked(self) -> str:
        link = self._rng.choice(PHRASES["links"])
        if self._rng.random() < 0.4 and link not in ("and", "but", "so", "or"):
            return f"{link} {self.clause()}, {self.clause()}."
        return f"{self.clause()}{self._rng.choice((',', ''))} {link} {self.clause()}."

    def _order(self) -> str:
        verb, rest = self._predicate()
        start = self._rng.choices(
            ("", "please ", "don't ", "let's ", "always ", "never ", "try to "), (60, 8, 10, 6, 5, 5, 6)
        )[0]
        again, more = self._predicate()
        return f"{start}{verb}{rest}{f' and {again}{more}' if self._rng.random() < 0.2 else ''}."

    def _question(self) -> str:
        (subject, be), (verb, rest) = self._subject(), self._predicate()
        does = "does" if be == "is" else "do"
        asks = self._rng.choice(("", "", "where ", "when ", "why ", "how "))
        return self._rng.choice(
            (
                f"{asks}{self._rng.choice((does, 'did'))} {subject} {verb}{rest}?",
                f"{asks}{be} {subject} {self._words.gerund(verb)}{rest}?",
                f"{asks}{self._rng.choice(('can', 'will', 'should', 'could', 'would'))} {subject} {verb}{rest}?",
                f"who {self._words.past(verb)}{rest}?",
                f"{self._rng.choice(('where', 'what', 'who', 'how', 'why'))} {be} {subject}?",
                f"{self._rng.choice(('which', 'what', 'whose'))} {self.noun()} {self._words.past(verb)}{rest}?",
                f"how {self._adjective()} {be} {subject}?",
            )
        )

    def _copula(self) -> str:
        subject, be = self._subject()
        verb = self._rng.choice((be, be, "was" if be in ("is", "am") else "were", "seemed", "became", "looked", "felt"))
        degree = self._rng.choice(("very", "quite", "too", "so", "not", "more", "rather", "as"))
        rest = self._rng.choice(
            (
                self._adjective(),
                f"{self._adjective()} and {self._adjective()}",
                f"{degree} {self._adjective()}",
                f"{self._adjective()}{self._rest()}",
                f"more {self._adjective()} than {self.object()}",
            )
        )
        start = f"there {self._rng.choice(('is', 'was'))} {with_article(self.noun())} {self.place()}"
        return f"{start if self._rng.random() < 0.2 else f'{subject} {verb} {rest}'}."

    def _list(self) -> str:
        items = [
            self._words.plural(self.noun()) if self._rng.random() < 0.5 else self.noun()
            for _ in range(self._rng.randint(2, 4))
        ]
        return f"{', '.join(items)}, {self._rng.choice(('and', 'or'))} {self.noun()}."

    def _speech(self) -> str:
        did = self._words.past(self._words.intransitive.draw(self._rng))
        said = self._rng.choice(("said", "asked", "replied", "thought", "wrote", "knew"))
        return self._rng.choice(
            (
                f"{self.clause()}, {self._somebody()} {said}.",
                f"{self._somebody()}, {self.clause()}.",
                f"my name is {self._somebody()}.",
                f"hello, {self._somebody()}.",
                f"{self._somebody()} {said} that {self.clause()}.",
                f"{self._somebody()}'s {self.noun()} {did}{self._rest()}.",
            )
        )

    def _reply(self) -> str:
        reply = self._rng.choice(PHRASES["replies"])
        return reply if self._rng.random() < 0.3 else f"{reply} {_capital(self.clause())}."


def _suffix(day: int) -> str:
    return "th" if 10 < day < 20 else {1: "st", 2: "nd", 3: "rd"}.get(day % 10, "th")

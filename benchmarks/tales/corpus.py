"""The text that the model learns: short tales of two animals each, written here as plots with words to choose.

A tale follows one plot; who meets whom, where, and over what is drawn from a seed, and later sentences keep to what
earlier ones said. Some pairs of animals never meet in the tales that are learned: theirs are held out.
Dedicated to the public domain (CC0 1.0).
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Final

ANIMALS: Final = {
    "fox": "she", "bear": "he", "hare": "he", "owl": "she", "mouse": "she", "wolf": "he", "hen": "she", "goat": "he",
    "crow": "she", "frog": "he", "deer": "she", "duck": "she", "cat": "she", "dog": "he", "mole": "he", "lamb": "she",
}  # fmt: skip
NATURES: Final = ("old", "young", "clever", "hungry", "shy", "proud", "kind", "lazy", "little", "merry")
PLACES: Final = {
    "wood": "in the wood", "hill": "on the hill", "river": "by the river", "mill": "near the mill",
    "meadow": "in the meadow", "lake": "by the lake", "barn": "behind the barn", "bridge": "under the bridge",
}  # fmt: skip
FOODS: Final = (
    "a red apple",
    "a sweet pear",
    "a loaf of bread",
    "a piece of cheese",
    "a pot of honey",
    "a bag of nuts",
)
THINGS: Final = ("a silver ring", "a small key", "a warm coat", "a golden bell", "a blue ribbon", "an old lantern")
HELD_OUT_SHARE: Final = 8
"""One pair of animals in so many is held out."""


@dataclass(frozen=True, slots=True)
class Cast:
    """Whom a tale is about, and what it turns on."""

    hero: str
    other: str
    nature: str
    place: str
    food: str
    thing: str

    @property
    def is_held_out(self) -> bool:
        """Whether no tale of these two is learned."""
        names = list(ANIMALS)
        return (3 * names.index(self.hero) + 5 * names.index(self.other)) % HELD_OUT_SHARE == 0


def tales(count: int, *, seed: int, held_out: bool = False) -> list[str]:
    """So many different tales, of pairs that are held out or of all others."""
    source = random.Random(seed)
    found: dict[str, None] = {}
    while len(found) < count:
        cast = _cast(source)
        if cast.is_held_out == held_out:
            found[source.choice(_PLOTS)(cast, source)] = None
    return list(found)


def _cast(source: random.Random) -> Cast:
    hero, other = source.sample(list(ANIMALS), 2)
    return Cast(
        hero=hero,
        other=other,
        nature=source.choice(NATURES),
        place=source.choice(list(PLACES)),
        food=source.choice(FOODS),
        thing=source.choice(THINGS),
    )


def _shared_meal(cast: Cast, source: random.Random) -> str:
    he, food = ANIMALS[cast.hero], cast.food.split(" ", 1)[1]
    reply = source.choice(("There is enough for two", "Sit down and eat with me", "Half of it is yours"))
    return (
        f"{_opening(cast, source)} One day {he} found {cast.food} {PLACES[cast.place]}. "
        f"The {cast.other} came along and looked at the {food}. "
        f'"I have not eaten today," said the {cast.other}. "{reply}," said the {cast.hero}. '
        f"So they shared the {food}, and {_friends(source)}"
    )


def _lost_thing(cast: Cast, source: random.Random) -> str:
    he, thing = ANIMALS[cast.hero], cast.thing.split(" ", 1)[1]
    reward = source.choice(("danced for joy", "thanked {him} three times", "gave {him} {food}"))
    reward = reward.format(him=_object(cast.other), food=cast.food)
    return (
        f"{_opening(cast, source)} One morning {he} lost {cast.thing}. "
        f"{he.capitalize()} looked for it {PLACES[cast.place]}, but it was not there. "
        f'"What are you looking for?" asked the {cast.other}. "My {thing} is gone," said the {cast.hero}. '
        f"The {cast.other} looked under a stone and found the {thing}. The {cast.hero} {reward}, and {_friends(source)}"
    )


def _storm(cast: Cast, source: random.Random) -> str:
    he, weather = ANIMALS[cast.hero], source.choice(("rain", "snow", "wind"))
    return (
        f"{_opening(cast, source)} One night the {weather} came, and {he} had no roof. "
        f'{he.capitalize()} knocked at the door of the {cast.other}. "Who is there?" asked the {cast.other}. '
        f'"It is only me, the {cast.hero}. May I come in from the {weather}?" '
        f"The {cast.other} opened the door and gave {_object(cast.hero)} {cast.food}. "
        f"When the sun came up, {_friends(source)}"
    )


def _race(cast: Cast, source: random.Random) -> str:
    he = ANIMALS[cast.other]
    slip = source.choice(("fell asleep under a tree", "stopped to eat", "took the wrong path"))
    return (
        f'{_opening(cast, source)} "I am faster than you," said the {cast.other} one day. '
        f'"Then let us race to the {cast.place}," said the {cast.hero}. '
        f"The {cast.other} ran ahead, but {he} {slip}. The {cast.hero} went on, step by step, and came to the "
        f"{cast.place} first. From that day the {cast.other} was not so proud."
    )


def _trick(cast: Cast, source: random.Random) -> str:
    he, thing = ANIMALS[cast.hero], cast.thing.split(" ", 1)[1]
    end = source.choice(("laughed and went home", "was ashamed and gave it back", "never did it again"))
    return (
        f"{_opening(cast, source)} {he.capitalize()} had {cast.thing}, and the {cast.other} wanted it. "
        f'"There is a great feast {PLACES[cast.place]}," said the {cast.other}. "Go and see!" '
        f"When the {cast.hero} had gone, the {cast.other} took the {thing}. "
        f"But there was no feast, and the {cast.hero} came back soon. The {cast.other} {end}."
    )


def _opening(cast: Cast, source: random.Random) -> str:
    home = source.choice([place for place in PLACES if place != cast.place])
    kind = f"{'an' if cast.nature[0] in 'aeiou' else 'a'} {cast.nature} {cast.hero}"
    return source.choice(
        (
            f"Once there was {kind} who lived {PLACES[home]}.",
            f"Long ago {kind} lived {PLACES[home]}.",
            f"{PLACES[home].capitalize()} lived {kind}.",
        )
    )


def _friends(source: random.Random) -> str:
    return source.choice(
        ("they were friends from that day on.", "they sang until the moon came up.", "they walked home together.")
    )


def _object(animal: str) -> str:
    return "her" if ANIMALS[animal] == "she" else "him"


_PLOTS: Final = (_shared_meal, _lost_thing, _storm, _race, _trick)

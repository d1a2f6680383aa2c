"""Warnings about a text that a voice for English letters cannot speak well: dropped characters, another language.

Languages are detected by their most frequent words, which is enough for a warning. Knows no voice."""

import re
import unicodedata
from collections import Counter

from sonoro.core.errors import InvalidRequest
from sonoro.core.types import TextFormat
from sonoro.text.english.line import fold
from sonoro.text.english.reader import read

_SHOWN = 40
_MIN_FOREIGN = 2
_FREQUENT = {
    "English": "the of and to is in that it for was on are as with his they at be this from have or by had but what "
    "all were when we there can an your which their if do will how then them would my me who you she he i not a so no",
    "German": "der und das ist ich nicht ein eine mit auf für sie auch wir dem den von zu sich wie oder aber nach bei "
    "einen wird sind haben hat guten danke bitte heute im es er",
    "French": "le les des et est une dans pour que qui pas sur avec vous nous ce cette sont il elle mais je ne aux "
    "plus bonjour merci être très où du au en",
    "Spanish": "el los las y es una por para con que del como pero más está son muy este esta hay ser hola gracias "
    "buenos todo cuando también se lo en un su",
    "Italian": "il gli di che è per con una sono della nel non questo questa anche ma come più ciao grazie buongiorno "
    "molto del lo si dei delle",
    "Portuguese": "os um uma não para com do da em que mais por são está foi você muito obrigado olá também isso ele "
    "ela dos das na pelo seu",
    "Dutch": "het een van en ik niet dat zijn op te met voor er maar je hij ook aan wij naar goed dank deze wordt "
    "heeft de",
    "Swedish": "och att det som en är på för av med den till inte jag har om ett men var hej tack vi från",
    "Danish": "og at det er en af på til med den som ikke jeg har de et men hej tak vi fra han hun",
    "Polish": "i w na nie się że to jest z do jak ale po czy tak dla dzień dobry przez był co ten od",
    "Turkish": "ve bir bu için ile ne çok daha gibi değil var olarak ben sen kadar ama merhaba günaydın",
    "Indonesian": "yang dan di itu dengan untuk tidak ini dari dalam akan pada juga saya ada bisa karena selamat",
    "Vietnamese": "và của là không có được cho một trong này với người những các tôi xin chào",
    "Finnish": "ja on ei se että hän oli olla ovat mutta kun myös niin kuin minä sinä hyvää kiitos tämä",
    "Romanian": "și este nu în cu pe la un din care mai sunt pentru bună fost ce se",
    "Czech": "je se na že to v s jako ale jsem bylo není dobrý den také nebo pro by",
    "Hungarian": "az és egy hogy nem van ez meg csak vagy jó napot mint volt már",
}
"""Words so frequent in a language that hardly a sentence lacks them."""

_LANGUAGES = {language: frozenset(words.split()) for language, words in _FREQUENT.items()}


def remarks(text: str, text_format: TextFormat = "auto") -> tuple[str, ...]:
    """Warnings about `text` in sentences, mostly none. Raises `InvalidRequest` as `check_readable` does."""
    check_readable(text)
    said = []
    dropped = read(text, text_format).dropped
    if dropped:
        shown = dropped if len(dropped) <= _SHOWN else dropped[:_SHOWN] + "..."
        count = f"{len(dropped)} character{'s' * (len(dropped) != 1)}"
        said.append(f"{count} cannot be spoken and will be left out: {shown}")
    if language := _language(text):
        said.append(f"this looks like {language}; the voice will read it as English")
    return tuple(said)


def _language(text: str) -> str:
    """The language with the most frequent words in `text`, if it is not English and has clearly more; else ""."""
    words = re.findall(r"[^\W\d_]+", text)
    # Skip capitalised words, which may be names: Las Vegas, La Jolla.
    plain = [word.lower() for number, word in enumerate(words) if number == 0 or word[0].islower()]
    found = {language: sum(word in frequent for word in plain) for language, frequent in _LANGUAGES.items()}
    language = max(found, key=lambda name: (found[name], name == "English"))
    is_foreign = found[language] >= max(_MIN_FOREIGN, found["English"] + 1) and found[language] * 8 >= len(words)
    return language if is_foreign else ""


def check_readable(text: str) -> None:
    """Raise `InvalidRequest`, naming the script, if more letters of `text` are unreadable than readable."""
    folded, _ = fold(text)
    # A single Greek letter is read by its name.
    words = re.findall(r"[^\W\d_a-zA-Z]{2,}|[^\W\d_a-zA-ZͰ-Ͽ]", folded)
    foreign = Counter(_script(letter) for word in words for letter in word)
    if foreign.total() > sum(letter.isascii() and letter.isalpha() for letter in folded):
        [(script, _)] = foreign.most_common(1)
        raise InvalidRequest("text", text, f"it is written in {script}; this voice reads English, in Latin letters")


def _script(letter: str) -> str:
    """The name of the script of `letter`, by Unicode."""
    name = unicodedata.name(letter, "an unknown script").split()[0]
    known = {"CJK": "Chinese characters", "HIRAGANA": "Japanese", "KATAKANA": "Japanese", "HANGUL": "Korean"}
    return known.get(name, name.title())

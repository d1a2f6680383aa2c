"""What a voice that reads English letters alone says of a text before it speaks it."""

import pytest

from sonoro.core.errors import InvalidRequest
from sonoro.text.english.readable import check_readable, remarks

UNREADABLE = {
    "Привет, как дела?": "Cyrillic",
    "Скидка 50% до 31.12.2026!": "Cyrillic",
    "你好，世界。": "Chinese characters",
    "こんにちは": "Japanese",
    "안녕하세요": "Korean",
    "مرحبا بالعالم": "Arabic",
    "שלום עולם": "Hebrew",
    "नमस्ते दुनिया": "Devanagari",
    "สวัสดีครับ": "Thai",
    "Καλημέρα κόσμε": "Greek",
    "iPhone は日本で人気があります": "Japanese",
}
ENGLISH = [
    "The birch canoe slid on the smooth planks.",
    "Hello!",
    "No.",
    "Café, naïve, façade, Zoë and El Niño in Los Angeles.",
    "I am in love with die Welt.",
    "He said: je ne sais quoi, and left.",
    "The Greek letters α and β, 5 μm wide, Δx.",
    "Tokyo is 東京 in Japanese.",
    "ＦＵＬＬ width 文",
    "Route 66, Las Vegas, San Jose, La Jolla, Des Moines, Du Bois, Van Gogh.",
    "In 2024, on a per capita basis, we see a 5% rise.",
    "Do not be so sure, as he has no idea, or is in a fix.",
]
FOREIGN = {
    "Das ist ein schöner Tag, und ich gehe nach Hause.": "German",
    "Guten Tag, wie geht es Ihnen?": "German",
    "Je ne sais pas où est la bibliothèque.": "French",
    "Bonjour, comment est-ce que vous allez ?": "French",
    "Hola, ¿cómo está usted? Muy bien, gracias.": "Spanish",
    "Il tempo è molto bello oggi, non è vero?": "Italian",
    "Obrigado, você é muito gentil.": "Portuguese",
    "Het weer is vandaag niet goed.": "Dutch",
    "Dzień dobry, jak się masz?": "Polish",
    "Bu çok güzel bir gün.": "Turkish",
    "Saya tidak bisa datang karena hujan.": "Indonesian",
    "Jag har inte tid att komma.": "Swedish",
}


@pytest.mark.parametrize(("text", "script"), UNREADABLE.items())
def test_a_text_that_is_mostly_in_another_script_is_refused_by_its_name(text: str, script: str) -> None:
    with pytest.raises(InvalidRequest, match=script) as refusal:
        check_readable(text)
    assert refusal.value.field == "text"


@pytest.mark.parametrize("text", [*ENGLISH, *FOREIGN, "123", "...", "☃ 5"])
def test_latin_letters_are_read_whatever_is_among_them(text: str) -> None:
    check_readable(text)


@pytest.mark.parametrize("text", ENGLISH)
def test_english_is_not_taken_for_another_language(text: str) -> None:
    assert not any("looks like" in remark for remark in remarks(text))


@pytest.mark.parametrize(("text", "language"), FOREIGN.items())
def test_another_language_in_latin_letters_is_named(text: str, language: str) -> None:
    [remark] = [remark for remark in remarks(text) if "looks like" in remark]
    assert language in remark


def test_what_is_left_out_is_one_sentence_that_shows_it() -> None:
    assert remarks("Tokyo is 東京, 東 ☃ ok") == ("3 characters cannot be spoken and will be left out: 東京☃",)
    assert remarks("A ☃.") == ("1 character cannot be spoken and will be left out: ☃",)
    [remark] = remarks("So it is written: " * 9 + "".join(map(chr, range(0x4E00, 0x4E00 + 90))))
    assert remark.startswith("90 characters")
    assert len(remark) < 120
    assert remarks("Plain words.") == ()

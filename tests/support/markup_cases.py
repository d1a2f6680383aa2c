"""Texts with markup, and what is said of them in the notation of `scripts.spoken`."""


def speak(inner: str) -> str:
    return f"<speak>{inner}</speak>"


def say_as(kind: str, text: str, form: str = "") -> str:
    return speak(f'<say-as interpret-as="{kind}" format="{form}">{text}</say-as>')


SSML = [
    ('Hi<break time="750ms"/>there', "hi. |750| there."),
    ("Hi<break/>there", "hi. |500| there."),
    ('Hi<break strength="strong" time="200ms"/>there', "hi. |200| there."),
    ('Hi<break time="0.5s"/> <break time="1s"/>there', "hi. |1500| there."),
    ('Hi.<break strength="none"/>There', "hi. there."),
    ('<break time="1s"/>Hi<break time="250ms"/>', "|1000| hi. |250|"),
    ('<sub alias="World Wide Web">W3C</sub> rules', "world wide web rules."),
    ('<voice name="nora">Hi.</voice><voice name="hugh">Yes.</voice>', "nora: hi. hugh: yes."),
    ('A <voice name="hugh">b</voice> c', "ay. hugh: b. c."),
    ('<voice gender="male">x</voice>', "hugh: x."),
    ('<prosody rate="50%">one</prosody>', "rate 0.5: one."),
    ('<prosody rate="slow">one</prosody>', "rate 0.75: one."),
    ('<prosody rate="+20%">one</prosody>', "rate 1.2: one."),
    ('<prosody rate="80%"><prosody rate="50%">x</prosody></prosody>', "rate 0.4: x."),
    ('<prosody volume="-6dB">x</prosody>', "gain 0.501: x."),
    ('<prosody volume="silent">x</prosody>', "gain 0: x."),
    ("<p><s>One</s><s>Two</s></p>", "one. two."),
    ("5 &lt; 6 &amp; 7 &gt; 3", "five is less than six and seven is greater than three."),
    ("<![CDATA[5 < 6]]>", "five is less than six."),
    ("one <!-- x --> two<?pi x?>", "one two."),
    ('<say-as interpret-as="characters">ABC-123</say-as>', "ay b c, one two three."),
    ('<say-as interpret-as="cardinal">1984</say-as>', "one thousand nine hundred and eighty four."),
    ('<say-as interpret-as="ordinal">10</say-as>', "tenth."),
    ('<say-as interpret-as="ordinal">3rd</say-as>', "third."),
    ('<say-as interpret-as="number_digit">4711</say-as>', "four seven one one."),
    ('<say-as interpret-as="digits">4711</say-as>', "four seven one one."),
    ('<say-as interpret-as="date">10-12-2016</say-as>', "october twelfth, twenty sixteen."),
    ('<say-as interpret-as="date" format="dmy">10-12-2016</say-as>', "december tenth, twenty sixteen."),
    ('<say-as interpret-as="date" format="ymd">2016-10-12</say-as>', "october twelfth, twenty sixteen."),
    ('<say-as interpret-as="time">1:30pm</say-as>', "one thirty p m."),
    ('<say-as interpret-as="telephone">(555) 010-2030</say-as>', "five five five, zero one zero, two zero three zero."),
    ('<say-as interpret-as="fraction">3/8</say-as>', "three eighths."),
    ("<w>one</w> <token>two</token>", "one two."),
    ('One <mark name="m"/>two', "one two."),
    ('one<voice name="hugh"><sub alias="x y"></sub> two</voice>', "one. hugh: x y two."),
    ('one <sub alias="x y"></sub>', "one x y."),
]

IGNORED = [
    ('<prosody pitch="+2st">Hi</prosody>', "hi.", "prosody pitch"),
    ("<foo>bar</foo>", "bar.", "foo"),
    ('<mstts:silence value="1s"/>bar', "bar.", "silence"),
    ('<audio src="http://x/y.mp3">beep</audio><desc>no</desc>', "beep.", "audio"),
    ('<lang xml:lang="de">Hallo</lang>', "hallo.", "lang de"),
    ('<phoneme alphabet="ipa" ph="wˈʊstər">Worcester</phoneme>', "worcester.", "phoneme"),
    ('<say-as interpret-as="date">99-99-2016</say-as>', "ninety nine ninety nine twenty sixteen.", "say-as date"),
    ('<say-as interpret-as="poem">Oh my</say-as>', "oh my.", "say-as poem"),
    ("<emphasis>Now</emphasis>", "now.", "emphasis"),
    ('<emphasis level="reduced">Now</emphasis>', "now.", "emphasis"),
    ('<mstts:express-as style="cheerful">Hi</mstts:express-as>', "hi.", "express-as"),
]

REFUSED = [
    (speak('<break time="-1s"/>'), "break time"),
    (speak('<break time="1"/>'), "break time"),
    (speak('<break time="1m"/>'), "break time"),
    (speak('<break time="61s"/>'), "at most|60 s"),
    (speak('<break time="60s"/>' * 11), "all pauses"),
    (speak('<break strength="long"/>'), "break strength"),
    (speak('<prosody rate="9%">x</prosody>'), "prosody rate"),
    (speak('<prosody volume="loudly">x</prosody>'), "prosody volume"),
    (speak("<sub>x</sub>"), "sub alias"),
    (say_as("date", "a <break/> b"), "text only"),
    ("<!DOCTYPE speak><speak/>", "DOCTYPE"),
    (speak("a&nbsp;b"), "line 1, column 9.*undefined entity nbsp"),
    (speak('<break time="1s">there'), "line 1, column 32.*mismatched tag"),
    (speak("<p>" * 33 + "</p>" * 33), "32 deep"),
    (speak("<w/>" * 2001), "2000 elements"),
    (speak('<lexicon uri="http://x/l.pls"/>'), "lexicon"),
    (speak("<w " + " ".join(f'a{n}=""' for n in range(17)) + "/>"), "16 attributes"),
]

TAGS = [
    ("tags", 'Hello.<break time="1s"/>Nice.', "hello. |1000| nice."),
    ("tags", "One <BREAK time='2s' /> two", "one. |2000| two."),
    ("tags", "One <break time=2s> two", "one. |2000| two."),
    ("tags", "<spell>Bob</spell>", "b o b."),
    ("tags", '<speed ratio="1.5"/>I like. <speed ratio="1"/>Now', "rate 1.5: i like. now."),
    ("tags", '<volume ratio="0.5"/>I like.', "gain 0.5: i like."),
    ("tags", "I <b>really</b> mean it", "i really mean it. w: b"),
    ("auto", "I <b>really</b> mean it", "i really mean it."),
    ("tags", '<emotion value="angry"/>No', "no. w: emotion"),
    ("tags", "Hi [pause 3.2s] there", "hi. |3200| there."),
    ("tags", "Hi [short pause] there [pause] my [long pause] friend", "hi. |250| there. |500| my. |1000| friend."),
    ("auto", "[Worcester](/wˈʊstər/) is easy. [pause:1s] See?", "worcester is easy. |1000| see? w: phoneme"),
    ("auto", "[PAUSE:0.5S]Hi", "|500| hi."),
    ("auto", "[pause=1.5]", "pause equals one point five."),
    ("auto", "Hi [pause 3.2s] there", "hi, pause three point two seconds, there."),
    ("auto", "[voice:nora] Hi [voice:hugh] Yes", "voice, nora, hi, voice, hugh, yes."),
    ("voices", "[voice:nora] Hi [voice:hugh] Yes [rate:1.2] now", "nora: hi. hugh: yes. hugh rate 1.2: now."),
    ("auto", r"\[pause:1s] x", "pause, one second, x."),
    ("none", 'Hi<break time="1s"/>there', "hi there."),
    ("deepgram", r'Take \{"word": "x", "pronounce": "ɛks"\}\{pause:500ms\}now', "take x. |500| now. w: phoneme"),
    ("tags", r"\<b> \[pause]", "b, pause."),
    ("tags", '<sub alias="sequel">SQL</sub> <voice name="hugh">is</voice> old', "sequel. hugh: is. old."),
    ("tags", "<<ˈ|b|ɑ>> Hi", "hi. w: phoneme"),
]

FOUND_SSML = [
    ('<say-as interpret-as="date" format="dm">25.12</say-as>', "december twenty fifth."),
    ('<say-as interpret-as="date" format="yyyymmdd">1960-09-10</say-as>', "september tenth, nineteen sixty."),
    ('<say-as interpret-as="date" format="dd/mm/yyyy">10/12/2016</say-as>', "december tenth, twenty sixteen."),
    ('<say-as interpret-as="date" format="ymd">20241225</say-as>', "december twenty fifth, twenty twenty four."),
    ('<say-as interpret-as="currency">$42.01</say-as>', "forty two dollars and one cent."),
    ('<say-as interpret-as="unit">10 kg</say-as>', "ten kilograms."),
    ('<say-as interpret-as="address">12 Elm St, Tampa</say-as>', "twelve elm street, tampa."),
    ('<say-as interpret-as="number" format="ordinal">3</say-as>', "third."),
    ('<say-as interpret-as="number" format="digits">123</say-as>', "one two three."),
    ('<say-as interpret-as="time">1\'21"</say-as>', "one minute twenty one seconds."),
    ('<say-as interpret-as="fraction">5+1/2</say-as>', "five and a half."),
    ('<say-as interpret-as="telephone">1-800-FLOWERS</say-as>', "one, eight hundred, flowers."),
    ('<say-as interpret-as="characters">a_b@c.de</say-as>', "ay, underscore, b, at, c, dot, d e."),
    ('<say-as interpret-as="characters">U.S.</say-as>', "u s."),
]
FOUND_IGNORED = [
    ("one<br/>two", "one. two.", "br"),
    ('<prosody speed="fast">bar</prosody>', "bar.", "prosody speed"),
    ('one<break duration="2s"/>two', "one. |500| two.", "break duration"),
    ('<say-as interpret-as="date" format="dd">5 5</say-as>', "five five.", "say-as date"),
    ('<say-as interpret-as="currency">42.01</say-as>', "forty two point zero one.", "say-as currency"),
]
FOUND_TAGS = [
    ("auto", "One [pause:1] two [pause:1s] three", "one two. |1000| three. w: pause 1"),
    ("auto", 'Use `<break time="1s"/>` in it.', "use break time equals one second in it."),
    ("auto", "```\n<break/>\n```\nText.[pause:1s] More", "text. |1000| more."),
]
"""What was misread or passed over in silence; apart, as the random texts are drawn from the lists above."""

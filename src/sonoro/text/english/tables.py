"""Tables of English abbreviations, units and symbols and their spoken forms, for `text.english.normalize`."""


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


def _pairs(text: str) -> dict[str, str]:
    """Written to spoken forms, from "Mr:Mister c/o:care_of" with _ for a space."""
    return dict(pair.replace("_", " ").split(":") for pair in text.split())


ABBREVIATIONS = _pairs(
    "Mr:Mister Mrs:Missus Ms:Miz Prof:Professor Jr:Junior Sr:Senior Capt:Captain Gen:General Sgt:Sergeant "
    "Lt:Lieutenant Col:Colonel Rev:Reverend Gov:Governor Sen:Senator Mt:Mount Ave:Avenue Rd:Road Blvd:Boulevard "
    "Inc:Incorporated Ltd:Limited Corp:Corporation Dept:Department approx:approximately Apt:Apartment Bldg:Building "
    "Hwy:Highway Pkwy:Parkway Ln:Lane Ct:Court Sq:Square Ste:Suite Esq:Esquire Hon:Honorable Assn:Association "
    "Bros:Brothers Co:Company Univ:University Govt:Government govt:government misc:miscellaneous Tel:Telephone "
    "tel:telephone Messrs:Messieurs etc:et_cetera Jan:January Feb:February Aug:August Sept:September Oct:October "
    "Nov:November Dec:December"
)
"""Expanded if a dot follows."""

BEFORE_NUMBER = _pairs(
    "apt:apartment ste:suite rm:room bldg:building hwy:highway rte:route fig:figure figs:figures vol:volume "
    "vols:volumes ch:chapter eq:equation ext:extension nos:numbers ep:episode"
)
"""Expanded before a number, with a dot or without."""

DOTTED_BEFORE_NUMBER = _pairs(
    "p:page pp:pages v:version ver:version ca:about art:article fl:floor sec:section para:paragraph"
)
"""Expanded before a number if a dot is between them."""

SHORT_WORDS = _pairs(
    "mins:minutes secs:seconds hrs:hours yrs:years wks:weeks w/o:without c/o:care_of b/c:because n/a:not_applicable "
    "N/A:not_applicable 24/7:twenty_four_seven 9/11:nine_eleven 50/50:fifty_fifty Ctrl:Control NE:northeast "
    "NW:northwest SE:southeast SW:southwest aka:also_known_as 4K:four_K 8K:eight_K 401k:four_oh_one_K "
    "401(k):four_oh_one_K"
)
"""Expanded as whole words; lower-case entries match any case."""

STREETS = _pairs("Ave:Avenue Blvd:Boulevard Rd:Road Ln:Lane Hwy:Highway Pkwy:Parkway St:Street")
COMPASS = {"N": "North", "E": "East", "S": "South", "W": "West"}
DAYS = {
    **{"Mon": "Monday", "Tue": "Tuesday", "Tues": "Tuesday", "Wed": "Wednesday", "Thu": "Thursday", "Thur": "Thursday"},
    **{"Thurs": "Thursday", "Fri": "Friday", "Sat": "Saturday", "Sun": "Sunday"},
}
SHORT_MONTHS = _pairs(
    "Jan:January Feb:February Mar:March Apr:April Jun:June Jul:July Aug:August Sep:September Sept:September "
    "Oct:October Nov:November Dec:December"
)
MONTHS = _words("January February March April May June July August September October November December")
STATES = _pairs(
    "AL:Alabama AK:Alaska AZ:Arizona AR:Arkansas CA:California CO:Colorado CT:Connecticut DE:Delaware FL:Florida "
    "GA:Georgia HI:Hawaii ID:Idaho IL:Illinois IN:Indiana IA:Iowa KS:Kansas KY:Kentucky LA:Louisiana ME:Maine "
    "MD:Maryland MA:Massachusetts MI:Michigan MN:Minnesota MS:Mississippi MO:Missouri MT:Montana NE:Nebraska NV:Nevada "
    "NH:New_Hampshire NJ:New_Jersey NM:New_Mexico NY:New_York NC:North_Carolina ND:North_Dakota OH:Ohio OK:Oklahoma "
    "OR:Oregon PA:Pennsylvania RI:Rhode_Island SC:South_Carolina SD:South_Dakota TN:Tennessee TX:Texas UT:Utah "
    "VT:Vermont VA:Virginia WA:Washington WV:West_Virginia WI:Wisconsin WY:Wyoming DC:D_C"
)
UNSURE_STATES = frozenset(_words("HI ID IN LA MA ME OH OK OR PA"))
"""State codes that are also words: expanded only before a ZIP code."""

_UNITS = _pairs(
    "km:kilometer cm:centimeter mm:millimeter m:meter kg:kilogram g:gram mg:milligram lb:pound lbs:pound oz:ounce "
    "yd:yard mi:mile gal:gallon ml:milliliter mL:milliliter L:liter tsp:teaspoon tbsp:tablespoon ha:hectare "
    "sq_m:square_meter sq_km:square_kilometer sq_mi:square_mile pcs:piece ms:millisecond sec:second secs:second "
    "min:minute mins:minute hr:hour hrs:hour h:hour wk:week wks:week yr:year yrs:year mph:mile_per_hour GB:gigabyte "
    "MB:megabyte kB:kilobyte KB:kilobyte TB:terabyte px:pixel Mbps:megabit_per_second Gbps:gigabit_per_second "
    "kbps:kilobit_per_second fps:frame_per_second dB:decibel bpm:beat_per_minute W:watt kW:kilowatt MW:megawatt "
    "kWh:kilowatt_hour V:volt mV:millivolt mA:milliampere mAh:milliampere_hour kcal:kilocalorie kPa:kilopascal "
    "psi:pound_per_square_inch x:time rpm:revolution_per_minute μm:micrometer μg:microgram μs:microsecond °:degree "
    "¢:cent USD:US_dollar EUR:euro GBP:pound"
)
UNITS = {
    **{short: (one, one.replace(" per ", "s per ") if " per " in one else f"{one}s") for short, one in _UNITS.items()},
    **{"ft": ("foot", "feet"), "sq ft": ("square foot", "square feet"), "sq. ft.": ("square foot", "square feet")},
    **{"Hz": ("hertz", "hertz"), "kHz": ("kilohertz", "kilohertz"), "MHz": ("megahertz", "megahertz")},
    **{"GHz": ("gigahertz", "gigahertz"), "%": ("percent", "percent")},
    **{"°C": ("degree Celsius", "degrees Celsius"), "°F": ("degree Fahrenheit", "degrees Fahrenheit")},
}
PERIODS = _pairs(
    "mo:month hr:hour h:hour wk:week yr:year min:minute s:second sec:second lb:pound kg:kilogram gal:gallon L:liter "
    "mi:mile km:kilometer"
) | {word: word for word in _words("month hour day week year minute second pound person night mile liter gallon")}
"""Units after the slash of an amount: $5/mo, 100 km/h."""

MONEY = {
    **{"$": ("dollar", "dollars", "cent", "cents"), "£": ("pound", "pounds", "penny", "pence")},
    **{"€": ("euro", "euros", "cent", "cents"), "¥": ("yen", "yen", "sen", "sen")},
    "₹": ("rupee", "rupees", "paisa", "paise"),
}
MAGNITUDES = {"k": "thousand", "m": "million", "b": "billion", "bn": "billion", "t": "trillion"}
INITIALISMS = _words("USA US UK EU UN AI ID IQ UFO CEO CIA FBI USB API FAQ URL OK ASAP RSVP ISBN UCLA HTTP HTTPS")
MARKS = {
    **{".": "dot", "/": "slash", "-": "dash", "_": "underscore", "?": "question mark", "=": "equals", "&": "and"},
    **{"#": "hash", "%": "percent", "+": "plus", ":": "colon", "~": "tilde", "@": "at"},
}
"""Spoken names of the punctuation in URLs and e-mail addresses."""

DOMAINS = "com|org|net|edu|gov|io|ai|dev|app|info|biz|co|uk|de|fr|eu|tv|ca|jp|au|ch|nl"
SPELLED_LABELS = frozenset(_words("ai io uk eu us tv api url faq id ui ux usa au ca de exe"))
FILES = (
    "pdf|html?|css|jsx?|tsx?|py|jpe?g|png|gif|svg|mp[34]|wav|txt|csv|md|php|sql|xml|json|ya?ml|zip|exe|docx?|xlsx?|"
    "pptx?"
)
CAPITAL_WORDS = frozenset(
    _words(
        "ACT ADD AGE AGO AHA AIR ALL AM AN AND ANY ARE ARM ART AS ASK AT BAD BE BED BIG BOX BOY BUT BUY BY CAN "
        "CAR CAT COP DAD DAY DID DO DOG EAR EAT EGG END EYE FAN FAR FEW FIX FOR FUN GET GIF GO GOD GOT GUY HA HAD "
        "HAS HAT HE HER HEY HIM HIS HIT HO HOT HOW IF IN IS IT ITS JOB JOY KEY KID LAN LAW LEG LET LIE LOT LOW "
        "MAN MAP MAY ME MEN MIX MOM MY NET NEW NO NOR NOT NOW OF OFF OH OIL OLD ON ONE OR OUR OUT OW OWN PAN PAY "
        "PEN PET PIN PUT RAM RAN RAW RED ROM RUN SAD SAT SAW SAY SEA SEE SET SHE SIM SIN SIR SIT SIX SO SON SUN "
        "TAX TEA TEN THE TIP TO TOO TOP TOY TRY TWO UH UM UP USE WAN WAR WAS WAY WE WET WHO WHY WIN WOW YES YET "
        "YOU ZIP"
    )
)
"""Words of two or three letters that are not spelled out even in capitals."""

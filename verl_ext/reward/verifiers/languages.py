"""Which language a text is in: by its script, and by its commonest words where languages share a script.

Deterministic and offline, unlike langdetect, which IFEval's own code uses. Knows the languages that IFEval asks for.
"""

import re
import unicodedata
from collections import Counter

_LANGUAGES_OF_SCRIPT = {
    "LATIN": "en de fr es pt it nl sv fi sw vi tr pl id",
    "CYRILLIC": "ru bg uk",
    "DEVANAGARI": "hi mr ne",
    "ARABIC": "ar fa ur",
    "BENGALI": "bn", "GUJARATI": "gu", "GURMUKHI": "pa", "KANNADA": "kn", "MALAYALAM": "ml", "TAMIL": "ta",
    "TELUGU": "te", "THAI": "th", "HANGUL": "ko",
    "HIRAGANA": "ja", "KATAKANA": "ja", "CJK": "zh", "GREEK": "el", "HEBREW": "he",
}  # fmt: skip
_COMMON_WORDS = {
    "en": "the of and to a in is that it for you was with on are be this as i have not by at from or we my your can",
    "de": "der die das und ist in den von zu mit sich nicht ein eine für auf dem es als auch ich wir sie im des",
    "fr": "le la les de des et est en un une que qui dans pour pas sur au avec ce il je nous vous du ne se",
    "es": "el la los las de y que en un una es por con no para se del su al lo como más pero mi",
    "pt": "o a os as de e que em um uma é por com não para se do da no na como mais mas eu seu sua",
    "it": "il lo la gli le di e che in un una è per con non si del della al come più ma mi sono nel",
    "nl": "de het een en van is in dat op te zijn met voor niet aan er ook als maar ik bij naar wij",
    "sv": "och att det i en som är på för av med till den inte om ett har de jag vi var kan",
    "fi": "ja on ei se että hän oli joka mutta niin kun ovat tai myös minä sinä olen voi kuin tämä mitä ole",
    "sw": "na ya wa kwa ni katika za la kuwa hii cha yake kama au sana pia lakini hiyo watu mimi wetu yangu vya yako",
    "vi": "và là của có không cho một được trong người với những này đã các để tôi bạn khi như về đó từ",
    "tr": "ve bir bu da de için ile çok ne daha olarak gibi ben sen var ama değil olan kadar en mi",
    "pl": "i w na z się nie do jest to że o jak ale po co tak za od przez dla czy są być",
    "id": "yang dan di itu dengan untuk tidak ini dari dalam akan pada juga saya kamu adalah ke karena bisa ada kami",
    "ru": "и в не на что он я с как это по но его к у из так же за от бы для мы вы она они о все",
    "bg": "и на да се в за не е от с че по си като са до ще но или тя той това при аз бъде съм към ви",
    "uk": "і в не на що з як це та до у він для за від його але є про ми ви вона вони або щоб",
    "hi": "है हैं के का की में से को और यह एक पर कि नहीं लिए था थे थी आप वह ने भी तो जो हम",
    "mr": "आहे आहेत आणि या ते तो ती मी हे एक नाही होते होता होती साठी मध्ये त्या आम्ही तुम्ही करा आपण तर पण काय च्या",
    "ne": "छ छन् र को मा यो हो एक लागि हुन्छ पनि गर्न गर्नुहोस् छैन तपाईं हामी तपाईंको भने थियो यस छु गर्ने लाई बाट सक्छ",
    "ar": "في من على إلى أن هذا التي الذي هو هي ما لا كان مع عن هذه ذلك كل أو ثم قد بعد لم بين أنا",
    "fa": "در به از که این را با است برای آن یک خود تا بر هم می شود های ما من او اما نیست شما بود",
    "ur": "کے کی میں ہے اور سے کا کو اس یہ ہیں نے پر ایک کہ بھی نہیں تھا آپ ہم وہ جو لیے ہو تو",
}  # fmt: skip
_WORDS = {language: frozenset(words.split()) for language, words in _COMMON_WORDS.items()}
MIN_SHARE = 0.7  # of the letters in one script


def detect_language(text: str) -> str | None:
    """ISO 639-1 code of the language of most of `text`; None if it is mixed, too short to tell, or not known here."""
    scripts = Counter(unicodedata.name(char, "?").split()[0].split("-")[0] for char in text if char.isalpha())
    if scripts["HIRAGANA"] + scripts["KATAKANA"]:
        scripts["HIRAGANA"] += scripts.pop("CJK", 0)
    if not scripts:
        return None
    script, count = scripts.most_common(1)[0]
    candidates = _LANGUAGES_OF_SCRIPT.get(script, "").split()
    if not candidates or count < MIN_SHARE * scripts.total():
        return None
    if len(candidates) == 1:
        return candidates[0]
    words = Counter(re.findall(r"[^\W\d_]+(?:[\u0900-\u097f]+[^\W\d_]*)*", text.lower()))
    hits = {language: sum(words[word] for word in _WORDS[language]) for language in candidates}
    best, second = sorted(candidates, key=hits.__getitem__, reverse=True)[:2]
    return best if hits[best] > hits[second] else None

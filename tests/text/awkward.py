"""Two hundred strings that tokenizers get wrong.

Not a test: the inputs of the token goldens, grouped by what they probe. Invisible and ambiguous
characters are written as escapes. Invalid UTF-8 enters as what a lenient decoder makes of it,
since text reaches a tokenizer as `str`. The order is part of the goldens: append only by replacing.
"""

from __future__ import annotations

EMOJI = (
    "😀",
    "🙂🙃",
    "I ❤\ufe0f you",
    "👍🏽 thumbs",
    "👩\u200d💻",
    "👨\u200d👩\u200d👧\u200d👦 family",
    "🏳\ufe0f\u200d🌈 flag",
    "🇯🇵🇧🇷🇩🇪",
    "🇬🇧 and 🏴\U000e0067\U000e0062\U000e0065\U000e006e\U000e0067\U000e007f",
    "1\ufe0f\u20e32\ufe0f\u20e3#\ufe0f\u20e3",
    "🧑🏻\u200d🤝\u200d🧑🏿",
    "🤷\u200d♀\ufe0f?",
    "🦀🐍☕🛠\ufe0f",
    "🎉🎉🎉🎉🎉🎉🎉🎉🎉🎉",
    "text😀text",
    " 😀 ",
    "🫠🫡🫥🪿🫨",
    "☺☺\ufe0e☺\ufe0f",
    "\U0001f9ff\U0001faf6\U0001fae1",
    "a\u200d😀",
)

CJK = (
    "你好,世界!",
    "今天天气很好。",
    "東京都に行きました。",
    "日本語のテキスト、カタカナとひらがな",
    "안녕하세요 세계",
    "한국어 띄어쓰기 테스트 123",
    "繁體中文與简体中文",
    "「引用」『二重』【括弧】",
    "中文English混合text",
    "一二三四五六七八九十百千万億",
    "ﾊﾝｶｸ カナ",
    "\u3000全角スペース\u3000",
    "全角ＡＢＣ１２３",
    "𠮷野家で𩸽を食べる",
    "々〆〇ヶ",
    "ㄱㄴㄷㅏㅑ",
    "\u1112\u1161\u11ab\u1100\u1173\u11af",
    "这是一个没有任何空格的很长的中文句子用来测试分词器如何处理连续的汉字序列",
    "3月14日(木)",
    "¥1,000円",
)

COMBINING = (
    "cafe\u0301",
    "café",
    "e\u0301\u0302\u0303\u0304",
    "Z\u0351\u036b\u0343\u036a\u0302a\u030a\u0360l\u0321g\u0327o\u0362",
    "A\u030angstro\u0308m Ångström",
    "n\u0303andu\u0301",
    "हिन्दी में नमस्ते",
    "ภาษาไทยไม่มีวรรค",
    "தமிழ் எழுத்து",
    "বাংলা ভাষা",
    "မြန်မာဘာသာ",
    "ខ្មែរ",
    "Tiếng Việt có dấu",
    "Tie\u0302\u0301ng Vie\u0323\u0302t",
    "\u0301leading mark",
    "\u1e9b\u0323 \u212b \u2126",
    "ﬁne ﬂow oﬃce",
    "ǅ ǈ ß ẞ ſ",
    "\u0958\u0959\u095a",
    "İıIi",
)

RTL = (
    "שלום עולם",
    "שָׁלוֹם",
    "مرحبا بالعالم",
    "السَّلامُ عَلَيْكُم",
    "العدد ١٢٣٤٥",
    "فارسی می\u200cخواهم",
    "English עברית mixed العربية text",
    "\u202eright to left\u202c",
    "\u2067isolate\u2069 end",
    "اردو زبان میں",
    "ܫܠܡܐ",
    "ދިވެހި",
)

CODE = (
    "def f(x):\n    return x + 1\n",
    "for (int i = 0; i < n; ++i) {\n\tsum += a[i];\n}",
    "#include <stdio.h>\nint main(void) { return 0; }",
    "if x == 1:\n        pass\n    else:\n\t\tpass",
    '<div class="a">\n  <p>Hi &amp; bye</p>\n</div>',
    '{"key": [1, 2.5, null, true], "s": "a\\nb"}',
    "SELECT * FROM t WHERE a='b' AND c<>d; -- comment",
    "let f = |x: &str| -> Option<u8> { x.bytes().next() };",
    "a->b.c::d<e>(f)[g]&&h||!i",
    "https://example.com/path?q=1&r=%20#frag",
    "user.name+tag@example.co.uk",
    "C:\\Users\\me\\file.txt",
    "/usr/local/bin:$PATH",
    "0xDEADBEEF 0b1010 0o777 1e-9 1_000_000",
    "camelCaseName snake_case_name SCREAMING_CASE kebab-case-name",
    "XMLHttpRequest2getURLFromID",
    "```python\nprint('hi')\n```",
    "// ====================================",
    "\\begin{align} x &= y \\\\ \\end{align}",
    "\u001b[31mred\u001b[0m",
    '#!/bin/sh\nset -eu\n\n\nexec "$@"\n',
    "lambda *a, **k: (yield)",
    "e = m * c ** 2;;;",
    "@decorator\nclass A(B, metaclass=C): ...",
)

SPACES = (
    "",
    " ",
    "  ",
    "   ",
    "\t",
    "\n",
    "\n\n",
    "\n\n\n",
    "\r\n",
    "\r\n\r\n",
    " \n",
    "\n ",
    " \n \n ",
    "\t\t\t",
    "\n\t\n\t",
    "a b",
    " a",
    "a ",
    "  a  b  ",
    "a   b    c     d",
    "Hello" + " " * 50 + "world",
    " " * 100,
    "\t" * 17 + "x",
    "\n" * 20 + "end",
    "x\r\ny\rz\n",
    "trailing tabs\t\t",
    "a\u00a0b\u2003c\u2009d\u202fe",
    "\u2028line\u2029para",
    "\x0b\x0c vertical",
    "a\n\n\n\nb\n\n\n\n\nc",
    "   leading and trailing   ",
    "▁ lower block ▁▁ marks",
)

SPECIAL = (
    "<|im_start|>user\nhi<|im_end|>",
    "<|endoftext|>",
    "text<|endoftext|>more",
    "<bos>hello<eos>",
    "<start_of_turn>user\nhi<end_of_turn>\n<start_of_turn>model\n",
    "<s>not a token</s>",
    "<pad><unk><mask>",
    "<|im_start|",
    "|im_end|>",
    "< |im_end| >",
    "<<|im_end|>>",
    "<|im_end|><|im_end|>",
    " <|im_start|> ",
    "<0x41><0x0A><0xFF>",
    "<unused0><unused1>",
    "[INST] hi [/INST]",
    "<|begin_of_text|><|eot_id|>",
    "<bos><bos>twice",
    "<table><tr><td>cell</td></tr></table>",
    "<|im_start|>assistant\n<|im_end|>\n",
)

BYTES = (
    b"bad \xff byte".decode("utf-8", "replace"),
    b"\xc3\x28".decode("utf-8", "replace"),
    b"cut \xe2\x82".decode("utf-8", "replace"),
    b"\xf0\x9f\x98 gone".decode("utf-8", "replace"),
    b"\x80\x81\xfe\xff".decode("utf-8", "replace"),
    "\ufffd",
    "latin \x80\x9f\xa0\xad",
    "Ã© mojibake Ã¼",
    "ĠĊĉ byte-level letters",
    "control \x01\x02\x1f\x7f",
    "\ufeffbom",
    "\ue000\uf8ff private",
    "\U0010ffff \ufdd0 noncharacters",
    "\U0001d518\U0001d52b\U0001d526 plane one",
)

ZERO_WIDTH = (
    "zero\u200bwidth\u200bspace",
    "join\u200der non\u200cjoiner",
    "word\u2060joiner",
    "soft\u00adhyphen",
    "\u200b\u200b\u200b",
    "\u200e\u200fmarks\u061c",
)

NUMBERS = (
    "0",
    "1234567890",
    "3.14159265358979",
    "1,234,567.89",
    "2024-02-29T23:59:59Z",
    "12 345 678",
    "x1y22z333w4444",
    "٣٫١٤ Ⅷ ½ ² ₃",
    "1" * 60,
    "v1.2.3-rc.4+build5",
)

WORDS = (
    "I'm you're he's we'll they'd I've don't",
    "I'M YOU'RE HE'S WE'LL THEY'D DON'T",
    "it\u2019s \u201cquoted\u201d \u2018text\u2019",
    "'tis 'twas rock 'n' roll",
    "l'été d'accord aujourd'hui",
    "a" * 300,
    "Donaudampfschifffahrtselektrizitätenhauptbetriebswerkbauunterbeamtengesellschaft",
    "pneumonoultramicroscopicsilicovolcanoconiosis",
    "!!!???...---___",
    "Hello, world! How are you?",
    "Привет, мир! Ёлка",
    "Γειά σου Κόσμε ΣΊΣΥΦΟΣ",
)

MATH = (
    "∀x∈ℝ: ⌈x⌉ = −⌊−x⌋",
    "∑_{i=0}^{n} i² = n(n+1)(2n+1)/6",
    "∫₀^∞ e^{−x²} dx = √π⁄2",
    "α β γ → λ ≤ μ ≠ ∞",
    "𝐀𝑩𝒞𝔇𝕖𝖋",
    "$\\frac{a}{b}$ \\(x\\) \\[y\\]",
    "A ⊂ B ∪ C ∩ ∅ ⇔ ¬p ∨ q",
    "5 × 3 ÷ 2 ± 1 °C µm ‰",
    "x̄ ŷ θ̂ ẋ ẍ",
    "⎛1 0⎞ ⟨ψ|φ⟩ ├──┤",
)


def awkward_strings() -> list[str]:
    """Every string above, in a fixed order; exactly 200, all different."""
    groups: tuple[tuple[str, ...], ...] = (EMOJI, CJK, COMBINING, RTL, CODE, SPACES, SPECIAL)
    groups += (BYTES, ZERO_WIDTH, NUMBERS, WORDS, MATH)
    return [text for group in groups for text in group]

"""Text of a message that was copied from a web page together with its tags."""

import re
from html.parser import HTMLParser

_PAGE = re.compile(r"\A\s*<(?:div|p|ol|ul|pre|blockquote|table|span|br|h[1-6])\b[^>]*>.*>\s*\Z", re.DOTALL | re.I)
_PAGE_OF_ANSWER = re.compile(r"\A\s*<div class=\"markdown\b[^>]*>(?P<inner>.*)</div>\s*\Z", re.DOTALL)
_PARAGRAPH = re.compile(r"\A\s*<p>(?P<inner>.*)</p>\s*\Z", re.DOTALL)
_WRAPPED_TEXT = re.compile(r"\A\s*<(div|p)>(?P<inner>(?:[^<]|<br ?/?>)*)</\1>\s*\Z")
_BLOCKS = {"div", "p", "ol", "ul", "pre", "blockquote", "table", "tr", "h1", "h2", "h3", "h4", "h5", "h6"}
_DROPPED = {"button", "script", "style", "svg"}


def text_of_page(text: str) -> str:
    """``text`` without tags if all of it is markup (it starts with a block's tag and ends with a tag), else unchanged.

    Code keeps its fence or back-quotes, list items their dash; buttons ("Copy code") go.
    """
    if not _PAGE.match(text):
        return text
    parser = _PageText()
    parser.feed(text)
    parser.close()
    return re.sub(r"\n{3,}", "\n\n", re.sub(r"[ \t]+\n", "\n", "".join(parser.parts))).strip()


def unwrapped_question(text: str) -> str:
    """``text`` without the one ``div`` or ``p`` around it, if nothing inside but line breaks is markup."""
    found = _WRAPPED_TEXT.match(text)
    return text_of_page(text) if found else text


def unwrapped_answer(text: str) -> str:
    """``text`` without the page's own container around an answer; markup that is the answer stays."""
    page = _PAGE_OF_ANSWER.match(text)
    if page is None:
        return text
    paragraph = _PARAGRAPH.match(page["inner"])
    return (paragraph or page)["inner"].strip()


class _PageText(HTMLParser):
    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.parts: list[str] = []
        self._dropping = 0
        self._in_pre = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag in _DROPPED:
            self._dropping += 1
        elif tag == "pre":
            self._in_pre += 1
            self.parts.append("\n\n")
        elif tag == "code":
            self.parts.append(f"\n```{_language(attrs)}\n" if self._in_pre else "`")
        elif tag == "li":
            self.parts.append("\n- ")
        elif tag == "br":
            self.parts.append("\n")
        elif tag in _BLOCKS:
            self.parts.append("\n\n")

    def handle_endtag(self, tag: str) -> None:
        if tag in _DROPPED:
            self._dropping = max(0, self._dropping - 1)
        elif tag == "code":
            self.parts.append("\n```\n" if self._in_pre else "`")
        elif tag == "pre":
            self._in_pre = max(0, self._in_pre - 1)
        elif tag in _BLOCKS:
            self.parts.append("\n\n")

    def handle_data(self, data: str) -> None:
        if not self._dropping:
            self.parts.append(data)


def _language(attributes: list[tuple[str, str | None]]) -> str:
    """Language named in a class such as ``language-python``."""
    for name, value in attributes:
        found = re.search(r"language-(\w+)", value or "") if name == "class" else None
        if found:
            return found[1]
    return ""

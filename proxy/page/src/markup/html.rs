//! Parts that several views share, and the last step of every page.
//!
//! Input is hostile: names of models, lines of logs and errors are foreign text. `maud::html!` escapes the
//! characters of markup. [`finish_page`] replaces characters that disguise a line.

use std::fmt::Display;

use maud::{Markup, PreEscaped, html};

/// Returns a page, or a part of one, as text. Replaces the characters that disguise foreign text; our own
/// markup has none of them.
pub(crate) fn finish_page(markup: Markup) -> String {
    let text = markup.into_string();
    if text.contains(disguises_text) {
        text.replace(disguises_text, char::REPLACEMENT_CHARACTER.encode_utf8(&mut [0; 4]))
    } else {
        text
    }
}

/// Returns a whole document. `head`: the elements of `<head>` after character set and viewport.
pub(crate) fn document(head: &Markup, body: &Markup) -> String {
    finish_page(html! {
        (PreEscaped("<!doctype html>"))
        html lang="en" {
            head {
                meta charset="utf-8";
                meta name="viewport" content="width=device-width, initial-scale=1";
                (head)
            }
            (body)
        }
        "\n"
    })
}

/// Matches control characters, and embeddings, overrides and isolates of the text direction.
fn disguises_text(c: char) -> bool {
    c.is_control() && !matches!(c, '\n' | '\t')
        || matches!(c, '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
}

/// Returns a list; empty if there are no lines.
pub(crate) fn text_list<T: Display>(lines: impl IntoIterator<Item = T>) -> Markup {
    let mut lines = lines.into_iter().peekable();
    html! {
        @if lines.peek().is_some() {
            ul {
                @for line in lines {
                    li { (line) }
                }
            }
        }
    }
}

/// Returns a list of names with descriptions; leaves out pairs without a description.
pub(crate) fn term_list<N: Display, V: AsRef<str>>(pairs: impl IntoIterator<Item = (N, V)>) -> Markup {
    html! {
        dl class="terms" {
            @for (name, value) in pairs {
                @let value = value.as_ref().trim_end();
                @if !value.is_empty() {
                    // Put both into one box, so that a long description cannot shift the next name.
                    div {
                        dt { (name) }
                        dd { (value) }
                    }
                }
            }
        }
    }
}

/// Returns the head of a table. Every element of a table has its role: without it a browser may not recognize
/// a table that is laid out as blocks or as a grid, as on a narrow screen.
pub(crate) fn table_head<T: Display>(titles: impl IntoIterator<Item = T>) -> Markup {
    html! {
        thead role="rowgroup" {
            tr role="row" {
                @for title in titles {
                    th role="columnheader" scope="col" { (title) }
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_that_is_told_can_leave_its_place() {
        for (text, safe) in [
            ("<script>alert(1)</script>", "&lt;script&gt;alert(1)&lt;/script&gt;"),
            ("\" onload=\"x", "&quot; onload=&quot;x"),
            ("it's & more", "it's &amp; more"),
            ("a\u{0}b\u{1b}[31m\r", "a\u{fffd}b\u{fffd}[31m\u{fffd}"),
            ("gguf\u{202e}fdp.exe", "gguf\u{fffd}fdp.exe"),
            ("two\nlines\tand 漢字 é", "two\nlines\tand 漢字 é"),
        ] {
            let page = finish_page(html! { a href=(text) { (text) } });
            assert_eq!(page, format!("<a href=\"{safe}\">{safe}</a>"));
        }
    }

    #[test]
    fn a_list_without_lines_is_nothing_and_its_lines_are_text() {
        assert_eq!(text_list(Vec::<String>::new()).into_string(), "");
        assert_eq!(text_list(["<one>"]).into_string(), "<ul><li>&lt;one&gt;</li></ul>");
    }

    #[test]
    fn a_table_says_of_each_part_what_it_is() {
        assert_eq!(
            table_head(["a", "<b>"]).into_string(),
            "<thead role=\"rowgroup\"><tr role=\"row\"><th role=\"columnheader\" scope=\"col\">a</th>\
             <th role=\"columnheader\" scope=\"col\">&lt;b&gt;</th></tr></thead>"
        );
    }

    #[test]
    fn each_term_has_one_description_whatever_it_says() {
        let pairs = [
            ("a", "1"),
            ("llama-server says", "version: 1\nbuilt with\n</dd><dd>"),
            ("none", "  \n"),
            ("b", "2"),
        ];
        let text = term_list(pairs).into_string();
        assert_eq!((text.matches("<dt>").count(), text.matches("<dd>").count()), (3, 3), "{text}");
        assert_eq!(text.matches("</dt><dd>").count(), 3, "{text}");
        assert!(text.contains("built with\n&lt;/dd&gt;") && !text.contains("none"), "{text}");
    }
}

//! The stylesheet of all pages, and the document around a self-contained file.
//!
//! All colours are custom properties at the top of the stylesheet, once for light and once for dark; a test
//! reads them and checks their contrast with the background.

use std::fmt::Display;

use maud::{Markup, PreEscaped, html};

use crate::markup::html::document;

/// Text of the stylesheet.
pub(crate) const CSS: &str = include_str!("style.css");

/// Returns a self-contained page: no script, no font, no network. `body` is the markup of `<main>`.
pub(crate) fn self_contained(title: impl Display, body: &Markup) -> String {
    // With this policy, hostile markup could neither run nor load anything.
    let policy = "default-src 'none'; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; \
                  form-action 'none'";
    let head = html! {
        meta http-equiv="Content-Security-Policy" content=(policy);
        title { (title) }
        style { (PreEscaped(CSS)) }
    };
    document(&head, &html! { body { main { (body) } } })
}

#[cfg(test)]
mod tests {
    use super::*;

    type Colour = [f64; 3];

    /// The custom properties of a block that are colours, by name.
    fn colours(block: &str) -> Vec<(&str, Colour)> {
        let declared =
            block.split(['{', '}', ';']).filter_map(|part| part.trim().strip_prefix("--")?.split_once(':'));
        let hex = declared.filter_map(|(name, value)| Some((name, value.trim().strip_prefix('#')?)));
        hex.map(|(name, hex)| {
            assert_eq!(hex.len(), 6, "{name} is written with six digits");
            let part = |at: usize| f64::from(u8::from_str_radix(&hex[at..at + 2], 16).unwrap()) / 255.0;
            (name, [part(0), part(2), part(4)])
        })
        .collect()
    }

    /// Contrast of two colours as defined by the guidelines for accessible pages (WCAG 2), 1 to 21.
    fn contrast(a: Colour, b: Colour) -> f64 {
        let light = |colour: Colour| {
            let [r, g, b] = colour
                .map(|part| if part <= 0.04045 { part / 12.92 } else { ((part + 0.055) / 1.055).powf(2.4) });
            0.2126 * r + 0.7152 * g + 0.0722 * b + 0.05
        };
        let (a, b) = (light(a), light(b));
        a.max(b) / a.min(b)
    }

    #[test]
    fn what_is_written_and_drawn_can_be_seen_in_light_and_in_dark() {
        let (light, rest) = CSS.split_once("@media screen and (prefers-color-scheme:dark)").unwrap();
        let dark = rest.split_once("}}").unwrap().0;
        let (light, dark) = (colours(light), colours(dark));
        let names = |of: &[(&str, Colour)]| of.iter().map(|(name, _)| (*name).to_owned()).collect::<Vec<_>>();
        assert_eq!(names(&light), names(&dark), "a colour has a value in both");
        for scheme in [light, dark] {
            let of = |name: &str| scheme.iter().find(|(known, _)| *known == name).unwrap().1;
            for ground in ["ground", "raised"] {
                for text in ["text", "quiet", "link", "good", "busy", "idle", "warn", "bad"] {
                    let found = contrast(of(text), of(ground));
                    assert!(found >= 4.5, "{text} on {ground}: {found:.2}");
                }
                for line in [
                    "read", "rest", "law", "soft", "hard", "coming", "room", "weights", "cache", "growth",
                    "other",
                ] {
                    let found = contrast(of(line), of(ground));
                    assert!(found >= 3.0, "{line} on {ground}: {found:.2}");
                }
            }
        }
    }

    /// A colour as seen without one kind of cones (Viénot, Brettel and Mollon 1999, for linear light).
    fn seen(colour: Colour, kind: &str) -> Colour {
        let [r, g, b] = colour.map(|part| part.powf(2.2));
        match kind {
            "no red" => [0.1124 * r + 0.8876 * g, 0.1124 * r + 0.8876 * g, 0.0040 * r - 0.0040 * g + b],
            "no green" => [0.2928 * r + 0.7072 * g, 0.2928 * r + 0.7072 * g, -0.0223 * r + 0.0223 * g + b],
            _ => [r, g, b],
        }
    }

    #[test]
    fn parts_of_a_bar_are_told_apart_by_whoever_confuses_red_and_green() {
        let (light, rest) = CSS.split_once("@media screen and (prefers-color-scheme:dark)").unwrap();
        for scheme in [colours(light), colours(rest.split_once("}}").unwrap().0)] {
            let parts = ["weights", "cache", "growth"];
            let of = |name: &str| scheme.iter().find(|(known, _)| *known == name).unwrap().1;
            for kind in ["all", "no red", "no green"] {
                for (index, a) in parts.iter().enumerate() {
                    for b in &parts[index + 1..] {
                        let (one, other) = (seen(of(a), kind), seen(of(b), kind));
                        let apart: f64 = one.iter().zip(other).map(|(x, y)| (x - y).powi(2)).sum();
                        assert!(
                            apart.sqrt() > 0.12,
                            "{a} and {b} look alike with {kind}: {:.3}",
                            apart.sqrt()
                        );
                    }
                }
            }
        }
    }

    #[test]
    fn a_document_needs_nothing_else_and_lets_nothing_run() {
        let page = self_contained("t</title><script>", &html! { h1 { "a <b>" } });
        for banned in ["<script", "http://", "https://", "src=", "@import", "url("] {
            assert!(!page.contains(banned), "{banned}");
        }
        assert!(page.contains("<h1>a &lt;b&gt;</h1>") && page.contains("t&lt;/title&gt;"));
        assert!(!CSS.contains("</"), "it stands inside of a page");
    }
}

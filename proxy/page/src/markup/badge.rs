//! Shows a state by colour, shape and word together: the shape helps readers who cannot distinguish
//! colours, the word helps readers who see neither.

use std::fmt::Display;

use maud::{Markup, html};

/// Meaning of a state.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) enum BadgeTone {
    /// All is well: a filled circle.
    Good,
    /// In progress: half a circle.
    Busy,
    /// Idle, as intended: an empty circle.
    Idle,
    /// Needs attention: a triangle.
    Warn,
    /// Failed: a square on its corner.
    Bad,
}

impl BadgeTone {
    /// Returns the CSS class that sets the tone's colour.
    pub(crate) const fn class(self) -> &'static str {
        match self {
            Self::Good => "good",
            Self::Busy => "busy",
            Self::Idle => "idle",
            Self::Warn => "warn",
            Self::Bad => "bad",
        }
    }

    /// Returns the SVG path of the tone's shape, in a square of 12 units.
    const fn path(self) -> &'static str {
        match self {
            Self::Good => "M6 1a5 5 0 1 0 0 10a5 5 0 1 0 0-10z",
            Self::Busy => "M6 1a5 5 0 1 0 0 10zM6 1a5 5 0 0 1 0 10l0-1.5a3.5 3.5 0 0 0 0-7z",
            Self::Idle => "M6 1a5 5 0 1 0 0 10a5 5 0 1 0 0-10zM6 2.5a3.5 3.5 0 1 1 0 7a3.5 3.5 0 1 1 0-7z",
            Self::Warn => "M6 .8L11.6 11H.4z",
            Self::Bad => "M6 0L12 6L6 12L0 6z",
        }
    }
}

/// Returns a badge with shape and word: `badge(BadgeTone::Bad, "failed")`.
pub(crate) fn badge(tone: BadgeTone, word: impl Display) -> Markup {
    html! {
        span class={ "badge " (tone.class()) } {
            svg class="shape" viewBox="0 0 12 12" aria-hidden="true" {
                path d=(tone.path()) fill="currentColor" fill-rule="evenodd" {}
            }
            (word)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_state_is_a_colour_a_shape_and_a_word() {
        let all = [BadgeTone::Good, BadgeTone::Busy, BadgeTone::Idle, BadgeTone::Warn, BadgeTone::Bad];
        for tone in all {
            let text = badge(tone, "a<b").into_string();
            assert!(text.contains(tone.class()) && text.contains("a&lt;b"), "{text}");
            assert!(
                crate::markup::style::CSS.contains(&format!(".{}{{", tone.class())),
                "{tone:?} has no colour"
            );
        }
        let mut shapes = all.map(BadgeTone::path).to_vec();
        shapes.dedup();
        assert_eq!(shapes.len(), all.len());
    }
}

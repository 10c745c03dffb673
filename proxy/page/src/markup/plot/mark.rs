//! Marks of events, and their shapes.

/// Kind of an event.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) enum PlotMarkKind {
    /// A process was replaced by the next one.
    Replacement,
    /// A process was asked to give memory back.
    Reclaim,
    /// A model was unloaded for another one.
    Eviction,
    /// A canary was tried.
    Canary,
    /// A process crashed.
    Crash,
    /// A changed configuration took effect.
    Configuration,
    /// Any other event; the reason describes it.
    Other,
}

impl PlotMarkKind {
    /// Returns the word in legends and lists, which is also the CSS class in the drawing.
    pub(crate) const fn word(self) -> &'static str {
        match self {
            Self::Replacement => "replacement",
            Self::Reclaim => "reclaim",
            Self::Eviction => "eviction",
            Self::Canary => "canary",
            Self::Crash => "crash",
            Self::Configuration => "configuration",
            Self::Other => "mark",
        }
    }

    /// Returns the SVG path of the shape around the origin, within 6 units to each side.
    pub(super) const fn path(self) -> &'static str {
        match self {
            Self::Replacement => "M-6 -5H6L0 6z",
            Self::Reclaim => "M0 -6L6 0L0 6L-6 0z",
            Self::Eviction => "M-5 -5H5V5H-5z",
            Self::Canary => "M0 -6L2 -2H6L3 1.5L4 6L0 3.5L-4 6L-3 1.5L-6 -2H-2z",
            Self::Crash => "M-6 -4L-4 -6L0 -2L4 -6L6 -4L2 0L6 4L4 6L0 2L-4 6L-6 4L-2 0z",
            Self::Configuration => "M-2 -6H2V-2H6V2H2V6H-2V2H-6V-2H-2z",
            Self::Other => "M0 -4a4 4 0 1 0 0 8a4 4 0 1 0 0 -8z",
        }
    }
}

/// An event at a position of the horizontal axis.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct PlotMark {
    /// Position: seconds since 1970.
    pub(crate) x: f64,
    /// Kind of the event.
    pub(crate) kind: PlotMarkKind,
    /// Reason in words, which is foreign text and must be escaped.
    pub(crate) why: String,
}

/// Limit of the marks in a plot, because more would overlap; the earliest are left out.
pub(super) const MAX_MARKS: usize = 200;

/// Returns the marks within a span, in the order of the axis, and the number of earlier marks left out.
pub(super) fn visible_marks(marks: &[PlotMark], from: f64, to: f64) -> (Vec<&PlotMark>, usize) {
    let mut inside: Vec<&PlotMark> = marks.iter().filter(|mark| mark.x >= from && mark.x <= to).collect();
    inside.sort_by(|a, b| a.x.total_cmp(&b.x));
    let left_out = inside.len().saturating_sub(MAX_MARKS);
    (inside.split_off(left_out), left_out)
}

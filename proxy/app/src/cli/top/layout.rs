//! How many lines of the screen each part gets. Pure; [`super::step`] asks too, because a page of keys is a page of the screen.

use super::state::State;

/// Below this nothing can be read.
pub(super) const LEAST: (u16, u16) = (60, 10);
/// From this height on there is room for events under the models.
const ROOM_FOR_EVENTS: u16 = 20;
/// Columns that the bar of a memory of the machine takes at least.
const MACHINE: u16 = 42;

/// Lines of the overview.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Overview {
    /// The host and the GPUs.
    pub(super) machine: u16,
    /// How many of those stand in a line.
    pub(super) beside: u16,
    /// The models.
    pub(super) rows: u16,
    /// Events, their head included.
    pub(super) events: u16,
}

pub(super) const fn too_small(size: (u16, u16)) -> bool {
    size.0 < LEAST.0 || size.1 < LEAST.1
}

pub(super) fn overview(state: &State) -> Overview {
    let (width, height) = state.size;
    let things = usize::from(state.picture.host.is_some()) + state.picture.gpus.len();
    let beside = (width / MACHINE).max(1);
    let lines = u16::try_from(things.div_ceil(usize::from(beside))).unwrap_or(u16::MAX);
    let machine = lines.min((height / 4).max(1));
    let events = if height < ROOM_FOR_EVENTS { 0 } else { 1 + (height / 8).min(6) };
    // The title, the sums, the head of the table, what comes next for the chosen model, and the keys.
    let rows = height.saturating_sub(5 + machine + events);
    Overview { machine, beside, rows, events }
}

/// Rows of models that are on the screen at once.
pub(super) fn page(state: &State) -> usize {
    usize::from(overview(state).rows).max(1)
}

/// Lines of the plot in the view of a model: half of it, where there is something to plot.
pub(super) const fn plot(height: u16) -> u16 {
    let half = height.saturating_sub(2) / 2;
    if half < 5 { 5 } else { half }
}

/// Lines of text in the view of a model, or of a log.
pub(super) fn text(state: &State, plotted: bool) -> usize {
    let taken = 2 + if plotted { plot(state.size.1) } else { 0 };
    usize::from(state.size.1.saturating_sub(taken)).max(1)
}

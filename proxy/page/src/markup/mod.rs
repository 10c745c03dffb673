//! Building blocks of the page: a view, and a saved view as a self-contained file.
//!
//! ```text
//!  values ──> plot, bar, badge ──> maud::Markup ──> a fragment of a page
//!             words                                 style::CSS next to it, or inside of a file
//! ```
//!
//! | module | content |
//! |---|---|
//! | `html` | lists and heads of tables, the document, and the last step of every page |
//! | `style` | the one stylesheet: light, dark, print, phones; [`style::self_contained`] puts it around a file |
//! | `badge` | a state as colour, shape and word |
//! | `bar` | the use of a budget |
//! | `plot` | memory over time with the fitted law, budgets, declared caches, events and forecasts |
//! | `time` | moments, for people and for a script that knows their time zone |
//! | `words` | names of memories, and tones of verdicts |
//!
//! The module decides nothing, reads no clock and no file, and opens no socket. The strictest content policy
//! allows its output, which has no script, font, `style` attribute or event handler, and needs no network.
//!
//! Markup is written with `maud`, which escapes every value, so forgetting to escape is not possible.

pub(crate) mod badge;
pub(crate) mod bar;
pub(crate) mod html;
mod number;
pub(crate) mod plot;
pub(crate) mod style;
pub(crate) mod time;
pub(crate) mod words;

pub(crate) use badge::{BadgeTone, badge};
pub(crate) use html::{document, finish_page, table_head, term_list, text_list};

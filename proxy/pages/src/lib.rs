//! What all pages that we write share, so that they have one look: the page of a running instance, and the report of an
//! experiment, which is a file that opens anywhere.
//!
//! ```text
//!  values ──> plot, bar, badge ──> Html ──> a fragment of a page
//!             words                          style::CSS beside it, or inside of a file
//! ```
//!
//! | module | makes |
//! |---|---|
//! | [`html`] | text that a browser cannot take for markup, and elements that are always closed |
//! | [`style`] | the one stylesheet: light, dark, print, phones; [`style::document`] puts it around a file |
//! | [`mod@badge`] | a state as colour, shape and word |
//! | [`bar`] | what something holds of its budget |
//! | [`plot`] | readings over work or time with the law, budgets, what is declared, what was done and what will come |
//! | [`spark`] | a line without axes, for a row of a table |
//! | [`mod@time`] | moments, for people and for a script that knows their zone |
//! | [`words`] | what a verdict means, in a sentence |
//!
//! It decides nothing, knows no clock, reads no file and opens no socket. Nothing that it makes needs a script, a font or a
//! network, and nothing has a `style` attribute or a handler of events, so it may be served under the strictest policy for
//! content.
//!
//! There is no engine for templates: what is made are lists, tables and drawings of numbers, in which text without its escape is
//! the one dangerous mistake. [`html::Html`] escapes whatever it is given, so that mistake cannot be made by forgetting something.

pub mod badge;
pub mod bar;
pub mod html;
pub mod plot;
pub mod spark;
pub mod style;
pub mod time;
pub mod words;

mod number;

pub use badge::{Tone, badge};
pub use html::{Html, escape};

//! What is written about a key beside its default and the reason for that: its meaning, what it takes, and whether it is a
//! key of a configuration.

/// A section of `defaults.toml`.
pub trait Section {
    /// Its name there.
    const NAME: &'static str;
    /// Its keys, in the order in which they are documented.
    const KEYS: &'static [Key];
}

/// One key of a section.
#[derive(Clone, Copy, Debug)]
pub struct Key {
    /// The name.
    pub name: &'static str,
    /// What it means, in a sentence.
    pub meaning: &'static str,
    /// A configuration may set it; otherwise it is compiled in.
    pub is_public: bool,
    /// Which values it takes.
    pub takes: Takes,
}

/// Which values a key takes, where its default does not say all of it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Takes {
    /// What its default is: a duration, a size, text, a number from 0 on, true or false.
    Usual,
    /// A file, relative to the configuration file, or nothing.
    Path,
    /// One of these words.
    OneOf(&'static [&'static str]),
    /// A whole number from the first to the second; `i64::MAX` is no limit.
    Whole(i64, i64),
    /// A share, 0 to 1.
    Share,
    /// A duration that is not shorter: without any time nothing could be done within it, or it would be done without a pause.
    AtLeast(&'static str),
    /// A duration from the first to the second, in which work is to be done.
    Within(&'static str, &'static str),
    /// `mirror`, `off`, or a list of origins.
    Origins,
    /// `auto`, `any`, or a list of host names.
    Names,
    /// Names with a git source each, to which people add their own.
    Sources,
}

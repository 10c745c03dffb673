//! Documentation of a configuration key: meaning, accepted values and visibility. The default and its
//! reason are in `defaults.toml`.

/// A section of `defaults.toml`.
pub trait DefaultsSection {
    /// Name of the section.
    const NAME: &'static str;
    /// Keys in documentation order.
    const KEYS: &'static [DefaultsKey];
}

/// A key of a section.
#[derive(Clone, Copy, Debug)]
pub struct DefaultsKey {
    /// Name of the key.
    pub name: &'static str,
    /// Meaning, in a sentence.
    pub meaning: &'static str,
    /// A configuration may set the key; otherwise it is compiled in.
    pub is_public: bool,
    /// Accepted values.
    pub takes: AcceptedValues,
}

/// Accepted values of a key, where its default does not determine them.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum AcceptedValues {
    /// Same kind as the default: a duration, a size, text, a number from 0, true or false.
    Usual,
    /// A file, relative to the configuration file, or nothing.
    Path,
    /// A choice among these words.
    OneOf(&'static [&'static str]),
    /// A whole number in this range; `i64::MAX` is no limit.
    Whole(i64, i64),
    /// A share, 0 to 1.
    Share,
    /// A duration with a lower limit, because zero would leave no time or no pause.
    AtLeast(&'static str),
    /// A duration in this range, for a time limit of work.
    Within(&'static str, &'static str),
    /// `mirror`, `off`, or a list of origins.
    Origins,
    /// `auto`, `any`, or a list of host names.
    Names,
    /// Names with a git source each; operators add their own.
    Sources,
}

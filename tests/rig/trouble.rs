//! Error type of the rig: a sentence. Tests print it and fail.

use std::fmt;

/// Reason why a test cannot continue.
pub struct Trouble(String);

/// Result of a test.
pub type Outcome = Result<(), Trouble>;

impl Trouble {
    /// Creates an error from a sentence.
    pub fn new(what: impl Into<String>) -> Self {
        Self(what.into())
    }
}

// Without `std::error::Error`, so that every other error converts into this one.
impl fmt::Debug for Trouble {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl fmt::Display for Trouble {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl<E: std::error::Error> From<E> for Trouble {
    fn from(error: E) -> Self {
        let mut text = error.to_string();
        let mut source = error.source();
        while let Some(cause) = source {
            text.push_str(": ");
            text.push_str(&cause.to_string());
            source = cause.source();
        }
        Self(text)
    }
}

/// Adds the failed action to an error.
pub trait Context<T> {
    /// Puts `what` before the cause.
    ///
    /// # Errors
    ///
    /// The same error, with `what` in front.
    fn context(self, what: impl fmt::Display) -> Result<T, Trouble>;
}

impl<T, E: Into<Trouble>> Context<T> for Result<T, E> {
    fn context(self, what: impl fmt::Display) -> Result<T, Trouble> {
        self.map_err(|error| Trouble(format!("{what}: {}", error.into())))
    }
}

impl<T> Context<T> for Option<T> {
    fn context(self, what: impl fmt::Display) -> Result<T, Trouble> {
        self.ok_or_else(|| Trouble(what.to_string()))
    }
}

//! Values that mitigations take after their `=`.

use serde::{Deserialize, Serialize};

use crate::set::{FixValue, FixVariable, VariableKind};

/// Specification of a mitigation's value.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct ValueSpec {
    /// Type of the value.
    #[serde(rename = "type")]
    pub kind: ValueKind,
    /// Minimum.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub min: Option<f64>,
    /// Maximum.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max: Option<f64>,
    /// Unit of a number; for text, a noun for its content.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub unit: String,
    /// Default; `None`: a value is required.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub default: Option<FixValue>,
    /// Allowed values of a choice.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub choices: Vec<String>,
    /// Choices restricted to some builds.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub limits: Vec<ChoiceLimit>,
}

/// Builds that support a choice.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct ChoiceLimit {
    /// The choice.
    pub choice: String,
    /// First build that supports the choice, such as `b8738`; empty: unknown or all.
    #[serde(default)]
    pub first: String,
    /// Last build that supports the choice; empty: the newest.
    #[serde(default)]
    pub last: String,
    /// Affected backends; empty: all.
    #[serde(default)]
    pub backends: Vec<String>,
    /// Consequence in builds that do not support the choice, as the end of a sentence.
    pub why: String,
}

/// Type of a value.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum ValueKind {
    /// A whole number.
    Integer,
    /// A number.
    Number,
    /// A word from a short list.
    Choice,
    /// Any text.
    Text,
}

impl ValueKind {
    pub(crate) const fn placeholder(self) -> &'static str {
        match self {
            Self::Integer | Self::Number => "N",
            Self::Choice | Self::Text => "TEXT",
        }
    }
}

impl ValueSpec {
    pub(super) fn from_variable(variable: &FixVariable) -> Option<Self> {
        let kind = match variable.kind {
            VariableKind::Integer => ValueKind::Integer,
            VariableKind::Number => ValueKind::Number,
            VariableKind::Path => ValueKind::Text,
            VariableKind::Flag => return None,
        };
        let unit = if variable.kind == VariableKind::Path && variable.unit.is_empty() {
            "the path of a file".to_owned()
        } else {
            variable.unit.clone()
        };
        Some(Self {
            kind,
            min: variable.min,
            max: variable.max,
            unit,
            default: variable.default.clone(),
            choices: Vec::new(),
            limits: Vec::new(),
        })
    }

    /// Allowed values as the end of a sentence: `a whole number from 1 to 100000 (graphs)`.
    pub fn description(&self) -> String {
        let noun = match self.kind {
            ValueKind::Integer => "a whole number",
            ValueKind::Number => "a number",
            ValueKind::Text => return if self.unit.is_empty() { "text".into() } else { self.unit.clone() },
            ValueKind::Choice => {
                let all: Vec<String> = self.choices.iter().map(|choice| format!("`{choice}`")).collect();
                return format!("one of {}", all.join(", "));
            }
        };
        let range = match (self.min, self.max) {
            (Some(min), Some(max)) => format!(" from {min} to {max}"),
            (Some(min), None) => format!(" from {min} on"),
            (None, Some(max)) => format!(" up to {max}"),
            (None, None) => String::new(),
        };
        let unit = if self.unit.is_empty() { String::new() } else { format!(" ({})", self.unit) };
        format!("{noun}{range}{unit}")
    }

    /// Returns the value in the form for a variable or flag.
    ///
    /// # Errors
    /// Fails if the value has another type or is out of range; the text names range and unit.
    pub fn check(&self, text: &str) -> Result<String, String> {
        let (bad, takes) = (|why: &str| format!("`{text}` {why}"), self.description());
        let number = match self.kind {
            ValueKind::Integer => {
                let number = text.parse::<i64>().map_err(|_| bad(&format!("is not {takes}")))?;
                #[expect(clippy::cast_precision_loss, reason = "the bounds are far below 2^53")]
                let number = number as f64;
                number
            }
            ValueKind::Number => match text.parse::<f64>() {
                Ok(number) if number.is_finite() => number,
                _ => return Err(bad(&format!("is not {takes}"))),
            },
            ValueKind::Choice if self.choices.iter().any(|choice| choice == text) => {
                return Ok(text.to_owned());
            }
            ValueKind::Choice => return Err(bad(&format!("is not {takes}"))),
            ValueKind::Text if text.is_empty() || text.contains('\0') => {
                return Err(bad(&format!("is not {takes}")));
            }
            ValueKind::Text => return Ok(text.to_owned()),
        };
        if self.min.is_some_and(|min| number < min) || self.max.is_some_and(|max| number > max) {
            return Err(bad(&format!("is out of range: it is {takes}")));
        }
        Ok(text.trim_start_matches('+').to_owned())
    }
}

//! What a mitigation takes after its `=`.

use serde::{Deserialize, Serialize};

use crate::set::{Value, Variable, VariableKind};

/// The value that a mitigation takes.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct ValueSpec {
    /// What it is.
    #[serde(rename = "type")]
    pub kind: ValueKind,
    /// The least value.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub min: Option<f64>,
    /// The greatest value.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max: Option<f64>,
    /// What is counted; for text, what it names.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub unit: String,
    /// What it is when nothing is given; none: it has to be given.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub default: Option<Value>,
    /// The only values there are, for a choice.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub choices: Vec<String>,
    /// Choices that are not for all builds.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub limits: Vec<ChoiceLimit>,
}

/// In which builds a choice can be used.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct ChoiceLimit {
    /// Which.
    pub choice: String,
    /// The first build that has it, such as `b8738`; empty: unknown or all.
    #[serde(default)]
    pub first: String,
    /// The last such build; empty: the newest.
    #[serde(default)]
    pub last: String,
    /// The backends of which that is said; empty: all.
    #[serde(default)]
    pub backends: Vec<String>,
    /// What happens elsewhere, as the end of a sentence.
    pub why: String,
}

/// What a value is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum ValueKind {
    /// A whole number.
    Integer,
    /// A number.
    Number,
    /// One of a few words.
    Choice,
    /// Any text.
    Text,
}

impl ValueKind {
    /// What stands for a value in a usage line.
    pub(crate) const fn placeholder(self) -> &'static str {
        match self {
            Self::Integer | Self::Number => "N",
            Self::Choice | Self::Text => "TEXT",
        }
    }
}

impl ValueSpec {
    /// What a variable of a fix takes; `None` for one that is on or off.
    pub(super) fn of(variable: &Variable) -> Option<Self> {
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

    /// What it takes, as the end of a sentence: `a whole number from 1 to 100000 (graphs)`.
    pub fn takes(&self) -> String {
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

    /// The value as a variable or a flag holds it, or what is wrong with it.
    ///
    /// # Errors
    /// The value is not of this kind or out of range; the text names the range and the unit.
    pub fn check(&self, text: &str) -> Result<String, String> {
        let (bad, takes) = (|why: &str| format!("`{text}` {why}"), self.takes());
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

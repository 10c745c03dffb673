//! Removes secrets from a report. Uses the common redactor (by name, place and look), and hides all secrets
//! of this machine's configuration and environment wherever they occur. Names of API keys, which are
//! people's names, become numbers.

use std::cell::RefCell;

use serde_json::Value;
use warden_policies::secrets::{self, KnownSecrets};

use crate::config::machine::HostMachine;
use crate::config::source::layers::LoadedConfig;

/// Texts before the name of an API key, in metrics and where a text names an operator. Each comes with the
/// character after the name.
const KEY_NAMES: [(&str, char); 2] = [("key=\"", '"'), ("page, key ", ',')];

#[derive(Debug, Default)]
pub(super) struct ReportCleaner {
    known: KnownSecrets,
    /// Names of API keys; the index gives the number.
    keys: RefCell<Vec<String>>,
}

impl ReportCleaner {
    /// Creates a cleaner for the secrets of the configuration, if any, and of the environment.
    pub(super) fn for_machine(loaded: Option<&LoadedConfig>, machine: &HostMachine) -> Self {
        let models = loaded.into_iter().flat_map(|loaded| {
            std::iter::once(&loaded.defaults).chain(loaded.models.iter().map(|(_, model)| model))
        });
        let (mut args, mut variables) = (Vec::new(), machine.text_vars());
        for model in models {
            args.extend(model.args.iter().cloned());
            variables.extend(model.env.iter().map(|(name, value)| (name.clone(), value.clone())));
        }
        let variables = variables.iter().map(|(name, value)| (name.as_str(), value.as_str()));
        Self { known: KnownSecrets::from_command(&args, variables), keys: RefCell::default() }
    }

    /// Cleans a text. Known secrets are hidden first: the redactor might cut one, and not recognise the rest.
    pub(super) fn clean_text(&self, text: &str) -> String {
        secrets::redact_text(&self.known.redact(self.number_keys(text)))
    }

    /// Replaces names of API keys by `key-1` and so on, with the same number for a name throughout the
    /// report.
    fn number_keys(&self, text: &str) -> String {
        let mut keys = self.keys.borrow_mut();
        KEY_NAMES.iter().fold(text.to_owned(), |text, (before, end)| {
            let mut parts = text.split(before);
            let mut shown = parts.next().unwrap_or_default().to_owned();
            for part in parts {
                let (name, rest) = part.split_at(part.find(*end).unwrap_or(part.len()));
                let known = keys.iter().position(|known| known == name);
                let number = known.unwrap_or_else(|| {
                    keys.push(name.to_owned());
                    keys.len() - 1
                });
                shown.extend([before, &*format!("key-{}", number + 1), rest]);
            }
            shown
        })
    }

    /// Cleans a value and formats it with indentation.
    pub(super) fn clean_json(&self, value: Value) -> String {
        serde_json::to_string_pretty(&self.clean_value(value)).unwrap_or_default() + "\n"
    }

    fn clean_value(&self, value: Value) -> Value {
        secrets::redact_json(self.hide_known(value))
    }

    /// Hides known secrets before the value becomes JSON text, in which quotation marks would be escaped.
    fn hide_known(&self, value: Value) -> Value {
        match value {
            Value::String(text) => self.known.redact(self.number_keys(&text)).into(),
            Value::Array(items) => items.into_iter().map(|item| self.hide_known(item)).collect(),
            Value::Object(fields) => {
                let field = |(name, value)| (self.known.redact(name), self.hide_known(value));
                fields.into_iter().map(field).collect()
            }
            other => other,
        }
    }

    /// Cleans a line of JSON or plain text.
    pub(super) fn clean_line(&self, line: &str) -> String {
        match serde_json::from_str::<Value>(line) {
            Ok(value @ (Value::Object(_) | Value::Array(_))) => self.clean_value(value).to_string(),
            _ => self.clean_text(line),
        }
    }
}

//! The key's part in an exchange: who is let in, and which models there are for it.

use http::HeaderMap;
use warden_policies::ModelName;
use warden_supervisor::ResolveError;

use super::{Key, Limit};
use crate::errors::Refusal;
use crate::exchange::Exchange;
use crate::routes::Own;

/// What everybody may ask: whether we live, and whether a browser may call. And what nobody is served.
fn is_open(own: &Own<'_>) -> bool {
    matches!(own, Own::Health | Own::Preflight | Own::Forbidden)
}

impl Exchange {
    /// Lets a request in, where keys are asked for. Its body has not been looked at.
    pub(crate) fn admit(&mut self, headers: &HeaderMap, own: Option<&Own<'_>>) -> Result<(), Refusal> {
        let Some(keys) = self.live.keys.as_ref().filter(|_| !own.is_some_and(is_open)) else { return Ok(()) };
        let key = keys.find(headers)?.clone();
        self.flight.record.key = Some(key.spec.name.clone());
        // Our own answers cost nobody anything.
        if own.is_none() {
            self.flight.pass = Some(key.admit()?);
        }
        self.key = Some(key);
        Ok(())
    }

    /// The model that a name means, among those that there are for this client.
    pub(crate) fn resolve(&self, name: Option<&str>) -> Result<ModelName, Refusal> {
        let resolved = self.shared.backends.resolve(name);
        let Some(key) = self.key.as_ref().filter(|key| key.spec.models.is_some()) else {
            return Ok(resolved?);
        };
        match resolved {
            Ok(model) if key.may_use(&model) => Ok(model),
            Ok(model) => {
                let asked = name.filter(|name| !name.is_empty()).unwrap_or(model.as_str());
                Err(self.hidden(key, asked.to_owned()))
            }
            Err(ResolveError::Missing { .. }) => match self.known().as_slice() {
                // For this client there is only one.
                [name] => Ok(ModelName::new(name)),
                _ => Err(ResolveError::Missing { known: self.known() }.into()),
            },
            Err(ResolveError::Unknown { name, .. }) => {
                Err(ResolveError::Unknown { name, known: self.known() }.into())
            }
        }
    }

    /// A model that exists and is not the key's to use: told as if it did not exist, so that nobody learns names with a
    /// key that has no right to them.
    fn hidden(&self, key: &Key, name: String) -> Refusal {
        key.usage.reject(Limit::Model);
        Refusal::Hidden(Box::new(ResolveError::Unknown { name, known: self.known() }.into()))
    }

    /// The model that stands in a path, in the same way: a name that is not the key's is no name there.
    pub(crate) fn resolve_path(&self, name: &str) -> Result<ModelName, Refusal> {
        self.resolve(Some(name)).map_err(|refusal| match refusal {
            Refusal::Hidden(_) => Refusal::Hidden(Box::new(Refusal::Upstream { known: self.known() })),
            other => other,
        })
    }

    /// Whether this client may know of a model.
    pub(crate) fn shows(&self, model: &ModelName) -> bool {
        self.key.as_ref().is_none_or(|key| key.may_use(model))
    }

    /// The names of the models that there are for this client.
    pub(crate) fn known(&self) -> Vec<String> {
        let view = self.shared.backends.view();
        let shown = view.models.iter().filter(|model| self.shows(&model.name));
        shown.map(|model| model.name.to_string()).collect()
    }

    /// A refusal that lists models, with those that there are for this client.
    pub(crate) fn told_of(&self, refusal: Refusal) -> Refusal {
        match refusal {
            Refusal::Upstream { .. } => Refusal::Upstream { known: self.known() },
            other => other,
        }
    }
}

//! What a client may do by its key: who is let in, and which models there are for it.

use std::sync::Arc;

use http::HeaderMap;
use warden_policies::ModelName;
use warden_supervisor::{FleetView, ModelView, ResolveError};

use super::{Key, Keys, Limit, Pass};
use crate::backend::backends::Backends;
use crate::body::budget::Share;
use crate::refusal::Refusal;

/// What a client may do; [`Default`] is: everything, because no keys are asked for.
#[derive(Debug, Default)]
pub(crate) struct Access {
    key: Option<Arc<Key>>,
}

impl Access {
    /// By the key that a request brings, which must be one of these.
    pub(crate) fn by_key(keys: &Keys, headers: &HeaderMap) -> Result<Self, Refusal> {
        Ok(Self { key: Some(keys.find(headers)?.clone()) })
    }

    /// Whether keys are asked for: then what the request brought is a key.
    pub(crate) fn has_key(&self) -> bool {
        self.key.is_some()
    }

    pub(crate) fn name(&self) -> Option<Arc<str>> {
        self.key.as_ref().map(|key| key.spec.name.clone())
    }

    /// Whether the key opens the page for operators.
    pub(crate) fn is_operator(&self) -> bool {
        self.key.as_ref().is_some_and(|key| key.spec.operator)
    }

    /// Takes what one request needs of the key.
    pub(crate) fn enter(&self) -> Result<Option<Pass>, Refusal> {
        self.key.as_ref().map(Key::admit).transpose()
    }

    /// What is held of the bodies that come with the key.
    pub(crate) fn held(&self) -> Option<Arc<Share>> {
        self.key.as_ref().map(|key| key.usage.held.clone())
    }

    /// The model that a name means, among those that there are for this client.
    pub(crate) fn resolve(&self, backends: &dyn Backends, name: Option<&str>) -> Result<ModelName, Refusal> {
        let resolved = backends.resolve(name);
        let Some(key) = self.key.as_ref().filter(|key| key.spec.models.is_some()) else {
            return Ok(resolved?);
        };
        match resolved {
            Ok(model) if key.may_use(&model) => Ok(model),
            Ok(model) => {
                Err(self.hide(backends, name.filter(|name| !name.is_empty()).unwrap_or(model.as_str())))
            }
            Err(ResolveError::Missing { .. }) => match self.known(backends).as_slice() {
                // For this client there is only one.
                [name] => Ok(ModelName::new(name)),
                known => Err(ResolveError::Missing { known: known.to_vec() }.into()),
            },
            Err(ResolveError::Unknown { name, .. }) => {
                Err(ResolveError::Unknown { name, known: self.names(backends) }.into())
            }
        }
    }

    /// A model that exists and is not the key's to use is refused as if it did not exist, so that nobody learns names with a key
    /// that has no right to them.
    pub(crate) fn hide(&self, backends: &dyn Backends, name: &str) -> Refusal {
        if let Some(key) = &self.key {
            key.usage.reject(Limit::Model);
        }
        let known = self.names(backends);
        Refusal::Hidden(Box::new(ResolveError::Unknown { name: name.to_owned(), known }.into()))
    }

    /// Whether this client may use a model, and know of it.
    pub(crate) fn may_use(&self, model: &ModelName) -> bool {
        self.key.as_ref().is_none_or(|key| key.may_use(model))
    }

    /// The names of the models that this client may use.
    pub(crate) fn known(&self, backends: &dyn Backends) -> Vec<String> {
        self.shown(&backends.view()).map(|model| model.name.to_string()).collect()
    }

    /// The same names with the aliases of each model.
    pub(crate) fn names(&self, backends: &dyn Backends) -> Vec<String> {
        self.shown(&backends.view()).flat_map(|model| model.names().map(str::to_owned)).collect()
    }

    fn shown<'a>(&'a self, view: &'a FleetView) -> impl Iterator<Item = &'a ModelView> {
        view.models.iter().map(|model| &**model).filter(|model| self.may_use(&model.name))
    }
}

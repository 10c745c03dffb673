//! Rights of a client by its key: admission of requests, and the models it may use.

use std::sync::Arc;

use http::HeaderMap;
use warden_policies::ModelName;
use warden_supervisor::{FleetView, ModelView, ResolveError};

use super::{ApiKey, ApiKeys, ConcurrencyPass, KeyLimit};
use crate::backend::LeaseProvider;
use crate::body::ClientShare;
use crate::refusal::RequestRefusal;

/// Rights of a client. [`Default`] permits everything, as in a gateway without keys.
#[derive(Debug, Default)]
pub(crate) struct ClientAccess {
    key: Option<Arc<ApiKey>>,
}

impl ClientAccess {
    pub(crate) fn from_headers(keys: &ApiKeys, headers: &HeaderMap) -> Result<Self, RequestRefusal> {
        Ok(Self { key: Some(keys.find(headers)?.clone()) })
    }

    /// False if the gateway requires no key.
    pub(crate) fn has_key(&self) -> bool {
        self.key.is_some()
    }

    pub(crate) fn name(&self) -> Option<Arc<str>> {
        self.key.as_ref().map(|key| key.spec.name.clone())
    }

    pub(crate) fn is_operator(&self) -> bool {
        self.key.as_ref().is_some_and(|key| key.spec.operator)
    }

    pub(crate) fn take_pass(&self) -> Result<Option<ConcurrencyPass>, RequestRefusal> {
        self.key.as_ref().map(ApiKey::admit).transpose()
    }

    pub(crate) fn held_share(&self) -> Option<Arc<ClientShare>> {
        self.key.as_ref().map(|key| key.usage.held.clone())
    }

    pub(crate) fn resolve(
        &self,
        backends: &dyn LeaseProvider,
        name: Option<&str>,
    ) -> Result<ModelName, RequestRefusal> {
        let resolved = backends.resolve(name);
        let Some(key) = self.key.as_ref().filter(|key| key.spec.models.is_some()) else {
            return Ok(resolved?);
        };
        match resolved {
            Ok(model) if key.may_use(&model) => Ok(model),
            Ok(model) => {
                Err(self
                    .refuse_hidden(backends, name.filter(|name| !name.is_empty()).unwrap_or(model.as_str())))
            }
            Err(ResolveError::Missing { .. }) => match self.known_names(backends).as_slice() {
                // The request names no model, and the client may use only this one.
                [name] => Ok(ModelName::new(name)),
                known => Err(ResolveError::Missing { known: known.to_vec() }.into()),
            },
            Err(ResolveError::Unknown { name, .. }) => {
                Err(ResolveError::Unknown { name, known: self.names_with_aliases(backends) }.into())
            }
        }
    }

    /// Refuses a model like an unknown one: a client must not learn the names of other models.
    pub(crate) fn refuse_hidden(&self, backends: &dyn LeaseProvider, name: &str) -> RequestRefusal {
        if let Some(key) = &self.key {
            key.usage.count_rejection(KeyLimit::Model);
        }
        let known = self.names_with_aliases(backends);
        RequestRefusal::Hidden(Box::new(ResolveError::Unknown { name: name.to_owned(), known }.into()))
    }

    pub(crate) fn may_use(&self, model: &ModelName) -> bool {
        self.key.as_ref().is_none_or(|key| key.may_use(model))
    }

    pub(crate) fn known_names(&self, backends: &dyn LeaseProvider) -> Vec<String> {
        self.visible_models(&backends.view()).map(|model| model.name.to_string()).collect()
    }

    pub(crate) fn names_with_aliases(&self, backends: &dyn LeaseProvider) -> Vec<String> {
        self.visible_models(&backends.view()).flat_map(|model| model.names().map(str::to_owned)).collect()
    }

    fn visible_models<'a>(&'a self, view: &'a FleetView) -> impl Iterator<Item = &'a ModelView> {
        view.models.iter().map(|model| &**model).filter(|model| self.may_use(&model.name))
    }
}

//! The route `GET /series`: recorded memory series, for programs.

use http::{Response, StatusCode};

use crate::response::{AdminBody, error_response, json_response};
use crate::series::answer::{MemoryData, NoSeriesError, list_series, memory_of_model};
use crate::series::ask::SeriesQuery;
use crate::state::AdminState;

impl AdminState {
    pub(crate) async fn series_answer(&self, query: Option<&str>) -> Response<AdminBody> {
        let ask = match SeriesQuery::from_query(query, self.records.series.policy()) {
            Ok(ask) => ask,
            Err(wrong) => return error_response(StatusCode::BAD_REQUEST, &wrong),
        };
        let Some(model) = &ask.model else {
            return match list_series(&self.records.series).await {
                Ok(listed) => json_response(StatusCode::OK, &listed),
                Err(failed) => error_response(StatusCode::SERVICE_UNAVAILABLE, &failed.to_string()),
            };
        };
        match self.memory_data(model, &ask).await {
            Ok(data) => json_response(StatusCode::OK, &data),
            Err(unknown @ NoSeriesError::Unknown(_)) => {
                error_response(StatusCode::NOT_FOUND, &unknown.to_string())
            }
            Err(failed) => error_response(StatusCode::SERVICE_UNAVAILABLE, &failed.to_string()),
        }
    }

    /// Returns the recorded memory of a model. `model` may be an alias.
    ///
    /// # Errors
    /// The model is unknown, or the disk does not answer.
    pub async fn memory_data(&self, model: &str, ask: &SeriesQuery) -> Result<MemoryData, NoSeriesError> {
        let own = self.fleet.resolve(Some(model)).map_or_else(|_| model.to_owned(), |name| name.to_string());
        memory_of_model(&self.records.series, &self.fleet.view(), &own, ask).await
    }
}

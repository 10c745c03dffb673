//! Locks a mutex even if it is poisoned. Counters, queues and displayed data are consistent after each
//! step, and refusing the lock would end tasks that have nothing to do with the panic.

use std::sync::{Mutex, MutexGuard, PoisonError};

pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

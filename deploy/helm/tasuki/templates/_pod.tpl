{{- /* What all pods have alike. Arguments: root, and the values of the router or of a pool. */ -}}
{{- define "tasuki.podSecurityContext" -}}
runAsNonRoot: true
runAsUser: {{ .Values.podSecurity.runAsUser }}
runAsGroup: {{ .Values.podSecurity.runAsUser }}
fsGroup: {{ .Values.podSecurity.fsGroup }}
fsGroupChangePolicy: OnRootMismatch
seccompProfile: {type: RuntimeDefault}
{{- end -}}

{{- define "tasuki.securityContext" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
  {{- if .ipcLock }}
  add: [IPC_LOCK]
  {{- end }}
{{- end -}}

{{- define "tasuki.image" -}}
image: {{ printf "%s:%s" .image.repository (.image.tag | default .root.Chart.AppVersion) | quote }}
imagePullPolicy: {{ .root.Values.images.pullPolicy }}
{{- end -}}

{{- define "tasuki.podFields" -}}
{{- with .root.Values.images.pullSecrets }}
imagePullSecrets:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .of.priorityClassName }}
priorityClassName: {{ . | quote }}
{{- end }}
{{- with .of.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .of.tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .of.spread }}
topologySpreadConstraints:
  - maxSkew: 1
    topologyKey: {{ .topologyKey | quote }}
    whenUnsatisfiable: {{ .whenUnsatisfiable }}
    labelSelector:
      matchLabels:
        {{- $.selector | nindent 8 }}
    matchLabelKeys: [pod-template-hash]
{{- end }}
securityContext:
  {{- include "tasuki.podSecurityContext" .root | nindent 2 }}
{{- end -}}

{{- define "tasuki.modelMount" -}}
{{- if .Values.model.volume }}
- name: model
  mountPath: {{ .Values.model.mountPath | quote }}
  readOnly: true
  {{- with .Values.model.subPath }}
  subPath: {{ . | quote }}
  {{- end }}
{{- end }}
{{- end -}}

{{- define "tasuki.volumes" -}}
{{- with .root.Values.model.volume }}
- name: model
  {{- toYaml . | nindent 2 }}
{{- end }}
- name: cache
  {{- toYaml (.root.Values.cache.volume | default (dict "emptyDir" dict)) | nindent 2 }}
- name: tmp
  emptyDir: {}
{{- with .root.Values.fleet.secretName }}
- name: fleet
  secret: {secretName: {{ . | quote }}, defaultMode: 0440}
{{- end }}
{{- with .of.extraVolumes }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- define "tasuki.mounts" -}}
{{- include "tasuki.modelMount" .root }}
- name: cache
  mountPath: /cache
- name: tmp
  mountPath: /tmp
{{- if .root.Values.fleet.secretName }}
- name: fleet
  mountPath: /etc/tasuki/fleet
  readOnly: true
{{- end }}
{{- with .of.extraVolumeMounts }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- define "tasuki.podEnv" -}}
- name: POD_NAME
  valueFrom: {fieldRef: {fieldPath: metadata.name}}
- name: POD_IP
  valueFrom: {fieldRef: {fieldPath: status.podIP}}
{{- end -}}

{{- /* Of containers that fetch or compile: everything that is written is below /cache. */ -}}
{{- define "tasuki.cacheEnv" -}}
- {name: HOME, value: /cache}
- {name: XDG_CACHE_HOME, value: /cache}
- {name: TASUKI_CACHE, value: /cache/tasuki}
- {name: HF_HOME, value: /cache/huggingface}
{{- with .Values.model.hubToken.secretName }}
- name: HF_TOKEN
  valueFrom: {secretKeyRef: {name: {{ . | quote }}, key: {{ $.Values.model.hubToken.key | quote }}}}
{{- end }}
{{- end -}}

{{- define "tasuki.fleetArgs" -}}
{{- if .Values.fleet.secretName }}
- --fleet-cert=/etc/tasuki/fleet/tls.crt
- --fleet-key=/etc/tasuki/fleet/tls.key
- --fleet-ca=/etc/tasuki/fleet/ca.crt
{{- end }}
{{- end -}}
